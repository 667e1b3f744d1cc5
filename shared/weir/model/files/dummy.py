"""Dummies: shapes of well-known models with seeded random weights (`--load dummy --model-shape NAME`).

The speed of a model is that of its shape, whatever the numbers are. A shape is the config.json of the model's
repository on Hugging Face, but for the ends of a text: random weights have none, so that an answer is as long as was
asked for.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from weir.model.architecture import Llama3Scaling, ModelConfig, SlidingWindow, tensor_shapes
from weir.model.errors import ModelNotFound
from weir.model.files.embedding_scale import embedding_scale
from weir.model.files.quant_blocks import QuantBlocks

DUMMY_SEED = 0
_DEVIATION = 0.02
"""Standard deviation of all but norms: what transformers initialises these models with."""
SPREAD = _DEVIATION * math.sqrt(3.0)
"""Numbers are uniform in [-SPREAD, SPREAD): five times as quick to draw as normal ones."""

_LLAMA_3 = ModelConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    max_context_tokens=131_072,
    tie_word_embeddings=False,
    eos_token_ids=(),
    bos_token_id=None,
    rotary_scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192),
)
_LLAMA_3_2 = replace(_LLAMA_3, tie_word_embeddings=True, rotary_scaling=Llama3Scaling(32.0, 1.0, 4.0, 8192))
_LLAMA_2 = replace(
    _LLAMA_3,
    vocab_size=32_000,
    intermediate_size=11_008,
    num_kv_heads=32,
    rope_theta=10_000.0,
    max_context_tokens=4096,
    rotary_scaling=None,
)
_MISTRAL = replace(_LLAMA_2, intermediate_size=14_336, num_kv_heads=8)
_QWEN_2_5 = replace(
    _LLAMA_3,
    vocab_size=151_936,
    rms_norm_eps=1e-6,
    rope_theta=1_000_000.0,
    max_context_tokens=32_768,
    query_key_value_bias=True,
    rotary_scaling=None,
)
_QWEN_3 = replace(_QWEN_2_5, max_context_tokens=40_960, query_key_value_bias=False, query_key_norm=True)
_GEMMA_3 = replace(
    _LLAMA_2,
    vocab_size=262_144,
    head_dim=256,
    num_kv_heads=1,
    rms_norm_eps=1e-6,
    rope_theta=1_000_000.0,
    max_context_tokens=32_768,
    tie_word_embeddings=True,
    query_key_norm=True,
    activation="gelu_tanh",
    post_norms=True,
    offset_norms=True,
)
_GEMMA_2 = replace(
    _GEMMA_3,
    vocab_size=256_000,
    rope_theta=10_000.0,
    max_context_tokens=8192,
    query_key_norm=False,
    attention_softcap=50.0,
    logit_softcap=30.0,
)
_PHI_4 = replace(_LLAMA_2, vocab_size=200_064, max_context_tokens=131_072, tie_word_embeddings=True, rotary_dim=96)
"""Without the factors of its rotary frequencies, which change no speed."""
_SMOLLM2 = replace(
    _LLAMA_2,
    vocab_size=49_152,
    head_dim=64,
    rope_theta=100_000.0,
    max_context_tokens=8192,
    tie_word_embeddings=True,
)


def _sized(base: ModelConfig, hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> ModelConfig:
    return replace(
        base,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
    )


def _gemma(base: ModelConfig, hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> ModelConfig:
    """Heads of 256, however wide the model is. One layer of 6, of Gemma 2 one of 2, attends to everything."""
    sized = _sized(replace(base, window=None), hidden, inner, layers, heads, kv_heads)
    tokens, period, theta = (512, 6, 10_000.0) if base.query_key_norm else (4096, 2, None)
    window = SlidingWindow(tokens, tuple((layer + 1) % period != 0 for layer in range(layers)), theta)
    return replace(sized, head_dim=256, window=window, embedding_scale=embedding_scale(hidden, "bfloat16"))


MODEL_SHAPES: Mapping[str, ModelConfig] = {
    # no model's: two layers, for tests and for a first look
    "tiny": replace(_sized(_SMOLLM2, 128, 256, 2, 4, 2), vocab_size=1024, max_context_tokens=2048),
    # HuggingFaceTB/SmolLM2-135M, -360M, -1.7B
    "smollm2-135m": _sized(_SMOLLM2, 576, 1536, 30, 9, 3),
    "smollm2-360m": _sized(_SMOLLM2, 960, 2560, 32, 15, 5),
    "smollm2-1.7b": replace(_sized(_SMOLLM2, 2048, 8192, 24, 32, 32), rope_theta=130_000.0),
    # meta-llama/Llama-2-7b, Llama-3.2-1B, Llama-3.2-3B, Llama-3.1-8B, Llama-3.1-70B
    "llama-2-7b": _LLAMA_2,
    "llama-3.2-1b": _sized(_LLAMA_3_2, 2048, 8192, 16, 32, 8),
    "llama-3.2-3b": _sized(_LLAMA_3_2, 3072, 8192, 28, 24, 8),
    "llama-3.1-8b": _LLAMA_3,
    "llama-3.1-70b": _sized(_LLAMA_3, 8192, 28_672, 80, 64, 8),
    # mistralai/Mistral-7B-v0.1, Mistral-7B-v0.3
    "mistral-7b-v0.1": replace(_MISTRAL, max_context_tokens=32_768, window=SlidingWindow(4096, (True,) * 32)),
    "mistral-7b-v0.3": replace(_MISTRAL, vocab_size=32_768, rope_theta=1_000_000.0, max_context_tokens=32_768),
    # Qwen/Qwen2.5-0.5B-Instruct, -1.5B-, -7B-, -14B-
    "qwen2.5-0.5b": replace(_sized(_QWEN_2_5, 896, 4864, 24, 14, 2), tie_word_embeddings=True),
    "qwen2.5-1.5b": replace(_sized(_QWEN_2_5, 1536, 8960, 28, 12, 2), tie_word_embeddings=True),
    "qwen2.5-7b": replace(_sized(_QWEN_2_5, 3584, 18_944, 28, 28, 4), vocab_size=152_064),
    "qwen2.5-14b": replace(_sized(_QWEN_2_5, 5120, 13_824, 48, 40, 8), vocab_size=152_064),
    # Qwen/Qwen3-0.6B, -1.7B, -4B, -8B: heads of 128, however wide the model is
    "qwen3-0.6b": replace(_sized(_QWEN_3, 1024, 3072, 28, 16, 8), head_dim=128, tie_word_embeddings=True),
    "qwen3-1.7b": replace(_sized(_QWEN_3, 2048, 6144, 28, 16, 8), tie_word_embeddings=True),
    "qwen3-4b": replace(_sized(_QWEN_3, 2560, 9728, 36, 32, 8), head_dim=128, tie_word_embeddings=True),
    "qwen3-8b": _sized(_QWEN_3, 4096, 12_288, 36, 32, 8),
    # google/gemma-2-2b-it, gemma-3-270m-it, gemma-3-1b-it
    "gemma2-2b": _gemma(_GEMMA_2, 2304, 9216, 26, 8, 4),
    "gemma3-270m": _gemma(_GEMMA_3, 640, 2048, 18, 4, 1),
    "gemma3-1b": _gemma(_GEMMA_3, 1152, 6912, 26, 4, 1),
    # microsoft/Phi-4-mini-instruct
    "phi-4-mini": _sized(_PHI_4, 3072, 8192, 32, 24, 8),
}


def shape_named(name: str) -> ModelConfig:
    """Raises ModelNotFound, naming the shapes that there are."""
    config = MODEL_SHAPES.get(name)
    if config is None:
        raise ModelNotFound(f"model_shape {name!r} is not known; one of {', '.join(MODEL_SHAPES)} is")
    return config


def is_norm(name: str) -> bool:
    """Norms are all ones."""
    return name.endswith("norm.weight")


def tensor_seed(name: str, seed: int) -> int:
    """63 bits, so that each tensor can be made by itself, in any order and on any machine."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class DummyTensors:
    """A `TensorFile` without a file: a tensor is made when it is read, and nothing is kept."""

    def __init__(self, config: ModelConfig, seed: int = DUMMY_SEED) -> None:
        self._shapes = tensor_shapes(config)
        self._seed = seed

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self._shapes)

    def read(self, name: str) -> npt.NDArray[np.float32]:
        shape = self._shapes[name]
        if is_norm(name):
            return np.ones(shape, dtype=np.float32)
        values = np.random.default_rng(tensor_seed(name, self._seed)).random(shape, dtype=np.float32)
        values *= 2 * SPREAD
        values -= SPREAD
        return values

    def try_view(self, name: str) -> None:
        """None: there is no file."""

    def try_read_blocks(self, name: str) -> QuantBlocks | None:
        """None: these are floating-point numbers."""
        return None

"""The configuration of a GGUF file, from its metadata and the names of its tensors."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from weir.model.architecture import (
    GivenScaling,
    LinearScaling,
    LongRopeScaling,
    ModelConfig,
    RotaryScaling,
    SlidingWindow,
)
from weir.model.errors import ModelError
from weir.model.files.embedding_scale import FloatType, embedding_scale
from weir.model.files.gguf import GgufFile, GgufTensor

_GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")
"""Values of `general.architecture`. Mistral's files say llama."""
_ROPE_FREQS = "rope_freqs.weight"
_SHORT_FACTORS, _LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
_F32, _F16, _BF16 = 0, 1, 30
_FLOAT_TYPES: Mapping[int, FloatType] = {_F16: "float16", _BF16: "bfloat16"}
_GEMMA3_THETA, _GEMMA3_LOCAL_THETA = 1e6, 1e4
_GEMMA_PERIODS = {"gemma2": 2, "gemma3": 6}
"""Where the file does not say: of so many layers the last attends to everything."""
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
"""By which llama.cpp, too, knows the ones whose scores are not scaled by the size of a head."""
_GEMMA2_ATTENTION_SOFTCAP, _GEMMA2_LOGIT_SOFTCAP = 50.0, 30.0


def check_gguf_header(gguf: GgufFile) -> None:
    """All that can be refused before the tensors are there. Raises ModelError, as `config_from_gguf` does."""
    _read_gguf_fields(gguf)


def _read_gguf_fields(gguf: GgufFile) -> "_GgufFields":
    """Raises ModelError for an architecture or a variant of one that Weir does not serve."""
    architecture = gguf.get("general.architecture", str)
    if architecture not in _GGUF_ARCHITECTURES:
        raise ModelError(
            f"{gguf.path}: general.architecture {architecture!r}; Weir serves "
            f"{', '.join(map(repr, _GGUF_ARCHITECTURES))}"
        )
    fields = _GgufFields(gguf, architecture)
    _refuse_gguf_variants(fields, fields.head_dim)
    return fields


def config_from_gguf(gguf: GgufFile) -> ModelConfig:
    """Raises ModelError: names the file, the field, and what Weir serves."""
    fields = _read_gguf_fields(gguf)
    hidden_size, num_heads, head_dim = fields.hidden_size, fields.num_heads, fields.head_dim
    embedding = _embedding(gguf)
    config = ModelConfig(
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=fields.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=gguf.get(fields.key("attention.layer_norm_rms_epsilon"), float),
        rope_theta=fields.number("rope.freq_base", _GEMMA3_THETA if fields.is_gemma3 else 10_000.0),
        max_context_tokens=_gguf_context_tokens(fields),
        tie_word_embeddings="output.weight" not in gguf.tensors,
        eos_token_ids=_gguf_eos_ids(gguf),
        bos_token_id=gguf.find("tokenizer.ggml.bos_token_id", int),
        query_key_value_bias="blk.0.attn_q.bias" in gguf.tensors,
        attention_output_bias="blk.0.attn_output.bias" in gguf.tensors,
        query_key_norm="blk.0.attn_q_norm.weight" in gguf.tensors,
        rotary_scaling=_gguf_rotary_scaling(fields, head_dim),
    )
    if fields.is_phi3:
        return _with_phi3(config, fields)
    return _with_gemma(config, fields, embedding) if fields.is_gemma else config


def _with_phi3(config: ModelConfig, fields: "_GgufFields") -> ModelConfig:
    rotary_dim = fields.integer("rope.dimension_count", config.head_dim)
    num_tokens = fields.integer("attention.sliding_window", 0)
    has_window = 0 < num_tokens < config.max_context_tokens
    return replace(
        config,
        rotary_dim=None if rotary_dim == config.head_dim else rotary_dim,
        window=SlidingWindow(num_tokens, (True,) * config.num_layers) if has_window else None,
        rotary_scaling=_longrope(fields, rotary_dim),
    )


def _longrope(fields: "_GgufFields", rotary_dim: int) -> LongRopeScaling | None:
    gguf = fields.gguf
    short, long = (_divisors(gguf, name, rotary_dim) for name in (_SHORT_FACTORS, _LONG_FACTORS))
    if short is None or long is None:
        return None
    original = fields.integer("rope.scaling.original_context_length")
    return LongRopeScaling(short, long, original, fields.number("rope.scaling.attn_factor", 1.0))


def _embedding(gguf: GgufFile) -> GgufTensor:
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{gguf.path}: has no matrix token_embd.weight")
    return embedding


def _with_gemma(config: ModelConfig, fields: "_GgufFields", embedding: GgufTensor) -> ModelConfig:
    """What the files of this architecture do not say, as llama.cpp knows it."""
    num_layers, architecture = config.num_layers, fields.architecture
    period = fields.integer("attention.sliding_window_pattern", _GEMMA_PERIODS[architecture])
    window = SlidingWindow(
        fields.integer("attention.sliding_window"),
        tuple(period > 0 and (layer + 1) % period != 0 for layer in range(num_layers)),
        fields.number("rope.freq_base_swa", _GEMMA3_LOCAL_THETA) if fields.is_gemma3 else None,
    )
    is_needed = fields.is_gemma3 or window.num_tokens < config.max_context_tokens
    is_27b = num_layers == _GEMMA_27B_LAYERS[architecture]
    config = replace(
        config,
        window=window if is_needed else None,
        query_pre_attn_scalar=config.hidden_size / config.num_heads if is_27b else None,
        embedding_scale=embedding_scale(config.hidden_size, _FLOAT_TYPES.get(embedding.type_id)),
        activation="gelu_tanh",
        post_norms=True,
        offset_norms=True,
    )
    if fields.is_gemma3:
        return config
    return replace(
        config,
        attention_softcap=fields.number("attn_logit_softcapping", _GEMMA2_ATTENTION_SOFTCAP),
        logit_softcap=fields.number("final_logit_softcapping", _GEMMA2_LOGIT_SOFTCAP),
    )


class _GgufFields:
    """Metadata under the architecture's prefix."""

    def __init__(self, gguf: GgufFile, architecture: str) -> None:
        self.gguf = gguf
        self.architecture = architecture

    @property
    def hidden_size(self) -> int:
        return self.integer("embedding_length")

    @property
    def num_heads(self) -> int:
        return self.integer("attention.head_count")

    @property
    def head_dim(self) -> int:
        return self.integer("attention.key_length", self.hidden_size // max(self.num_heads, 1))

    @property
    def is_phi3(self) -> bool:
        return self.architecture == "phi3"

    @property
    def is_gemma(self) -> bool:
        return self.architecture in _GEMMA_PERIODS

    @property
    def is_gemma3(self) -> bool:
        return self.architecture == "gemma3"

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def integer(self, name: str, default: int | None = None) -> int:
        if default is None:
            return self.gguf.get(self.key(name), int)
        found = self.gguf.find(self.key(name), int)
        return default if found is None else found

    def number(self, name: str, default: float) -> float:
        found = self.gguf.find(self.key(name), float)
        return default if found is None else found


def _refuse_gguf_variants(fields: _GgufFields, head_dim: int) -> None:
    path = fields.gguf.path
    for name in ("attention.value_length",) if fields.is_phi3 else ("rope.dimension_count", "attention.value_length"):
        found = fields.integer(name, head_dim)
        if found != head_dim:
            raise ModelError(f"{path}: {fields.key(name)} is {found}; Weir serves {head_dim}, the size of a head, only")
    if fields.integer("expert_count", 0):
        raise ModelError(f"{path}: mixtures of experts ({fields.key('expert_count')}) are not supported")


def _gguf_context_tokens(fields: _GgufFields) -> int:
    """Which layers have a window, files of the older architectures do not say. Up to it a model attends to everything,
    and so does Weir: longer contexts are not served."""
    trained = fields.integer("context_length")
    if fields.is_gemma or fields.is_phi3:
        return trained
    window = fields.integer("attention.sliding_window", 0)
    return min(trained, window) if window > 0 else trained


def _gguf_rotary_scaling(fields: _GgufFields, head_dim: int) -> RotaryScaling | None:
    factor = _linear_factor(fields)
    divisors = _divisors(fields.gguf, _ROPE_FREQS, head_dim)
    if divisors is not None:
        return GivenScaling(tuple(divisor * factor for divisor in divisors))
    return None if factor == 1.0 else LinearScaling(factor)


def _linear_factor(fields: _GgufFields) -> float:
    gguf = fields.gguf
    kind = gguf.find(fields.key("rope.scaling.type"), str)
    if kind not in {None, "none", "linear"}:
        raise ModelError(
            f"{gguf.path}: {fields.key('rope.scaling.type')} {kind!r} is not supported, only 'none', 'linear', "
            f"and the divisors of {_ROPE_FREQS}"
        )
    # files older than the key of the type have one or the other factor alone
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    return 1.0 if kind == "none" or factor == 0.0 else factor


def _divisors(gguf: GgufFile, name: str, rotary_dim: int) -> tuple[float, ...] | None:
    """None: there is no such tensor."""
    tensor, num_divisors = gguf.tensors.get(name), rotary_dim // 2
    if tensor is None:
        return None
    if tensor.type_id != _F32 or tensor.shape != (num_divisors,):
        raise ModelError(
            f"{gguf.path}: {name} has type {tensor.type_id} and shape {list(tensor.shape)}, "
            f"expected F32 of shape [{num_divisors}]"
        )
    if tensor.offset + num_divisors * np.dtype("<f4").itemsize > gguf.path.stat().st_size:
        raise ModelError(f"{gguf.path}: cut off inside tensor {name}")
    values = np.fromfile(gguf.path, dtype="<f4", count=num_divisors, offset=tensor.offset)
    return tuple(values.tolist())


def _gguf_eos_ids(gguf: GgufFile) -> tuple[int, ...]:
    found = (gguf.find(f"tokenizer.ggml.{name}_token_id", int) for name in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(token_id for token_id in found if token_id is not None))

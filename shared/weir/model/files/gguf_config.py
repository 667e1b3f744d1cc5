"""A model's configuration from the metadata of a GGUF file."""

import numpy as np

from weir.model.architecture import GivenScaling, LinearScaling, ModelConfig, RotaryScaling
from weir.model.errors import ModelError
from weir.model.files.gguf import GgufFile

ARCHITECTURES = ("llama", "qwen2")
"""Values of `general.architecture`. Mistral's files say llama."""
_ROPE_FREQS = "rope_freqs.weight"
_F32 = 0


def config_from_gguf(gguf: GgufFile) -> ModelConfig:
    """Raises ModelError: names the file, the field, and what Weir serves."""
    architecture = gguf.get("general.architecture", str)
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{gguf.path}: general.architecture {architecture!r}; Weir serves {' and '.join(map(repr, ARCHITECTURES))}"
        )
    fields = _Fields(gguf, architecture)
    hidden_size = fields.integer("embedding_length")
    num_heads = fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", hidden_size // max(num_heads, 1))
    _refuse_variants(fields, head_dim)
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{gguf.path}: has no matrix token_embd.weight")
    return ModelConfig(
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=fields.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=gguf.get(fields.key("attention.layer_norm_rms_epsilon"), float),
        rope_theta=fields.number("rope.freq_base", 10_000.0),
        max_context_tokens=_max_context_tokens(fields),
        tie_word_embeddings="output.weight" not in gguf.tensors,
        eos_token_ids=_eos_ids(gguf),
        bos_token_id=gguf.find("tokenizer.ggml.bos_token_id", int),
        query_key_value_bias="blk.0.attn_q.bias" in gguf.tensors,
        attention_output_bias="blk.0.attn_output.bias" in gguf.tensors,
        rotary_scaling=_rotary_scaling(fields, head_dim),
    )


class _Fields:
    """Metadata under the architecture's prefix."""

    def __init__(self, gguf: GgufFile, architecture: str) -> None:
        self.gguf = gguf
        self._architecture = architecture

    def key(self, name: str) -> str:
        return f"{self._architecture}.{name}"

    def integer(self, name: str, default: int | None = None) -> int:
        if default is None:
            return self.gguf.get(self.key(name), int)
        found = self.gguf.find(self.key(name), int)
        return default if found is None else found

    def number(self, name: str, default: float) -> float:
        found = self.gguf.find(self.key(name), float)
        return default if found is None else found


def _refuse_variants(fields: _Fields, head_dim: int) -> None:
    path = fields.gguf.path
    for name in ("rope.dimension_count", "attention.value_length"):
        found = fields.integer(name, head_dim)
        if found != head_dim:
            raise ModelError(f"{path}: {fields.key(name)} is {found}; Weir serves {head_dim}, the size of a head, only")
    if fields.integer("expert_count", 0):
        raise ModelError(f"{path}: mixtures of experts ({fields.key('expert_count')}) are not supported")


def _max_context_tokens(fields: _Fields) -> int:
    """Up to its sliding window a model attends to everything, and so does Weir."""
    trained = fields.integer("context_length")
    window = fields.integer("attention.sliding_window", 0)
    return min(trained, window) if window > 0 else trained


def _rotary_scaling(fields: _Fields, head_dim: int) -> RotaryScaling | None:
    factor = _linear_factor(fields)
    divisors = _divisors(fields.gguf, head_dim)
    if divisors is not None:
        return GivenScaling(tuple(divisor * factor for divisor in divisors))
    return None if factor == 1.0 else LinearScaling(factor)


def _linear_factor(fields: _Fields) -> float:
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


def _divisors(gguf: GgufFile, head_dim: int) -> tuple[float, ...] | None:
    tensor = gguf.tensors.get(_ROPE_FREQS)
    if tensor is None:
        return None
    if tensor.type_id != _F32 or tensor.shape != (head_dim // 2,):
        raise ModelError(
            f"{gguf.path}: {_ROPE_FREQS} has type {tensor.type_id} and shape {list(tensor.shape)}, "
            f"expected F32 of shape [{head_dim // 2}]"
        )
    values = np.fromfile(gguf.path, dtype="<f4", count=head_dim // 2, offset=tensor.offset)
    if len(values) != head_dim // 2:
        raise ModelError(f"{gguf.path}: cut off inside tensor {_ROPE_FREQS}")
    return tuple(values.tolist())


def _eos_ids(gguf: GgufFile) -> tuple[int, ...]:
    found = (gguf.find(f"tokenizer.ggml.{name}_token_id", int) for name in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(token_id for token_id in found if token_id is not None))

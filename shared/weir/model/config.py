"""The numbers that define a model, from GGUF metadata or a Hugging Face config.json."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weir.kv.geometry import PageGeometry
from weir.model.errors import ModelError
from weir.model.gguf_file import GgufFile, read_gguf
from weir.model.source import ModelKind, ModelSource

_ARCHITECTURE = "llama"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama architecture; keys and values in fp32."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_context_tokens: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "rms_norm_eps",
            "rope_theta",
            "max_context_tokens",
        ):
            if getattr(self, name) <= 0:
                raise ModelError(f"model configuration: {name} is {getattr(self, name)}, expected more than 0")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"model configuration: num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ModelError(f"model configuration: head_dim is {self.head_dim}, expected an even number")

    @property
    def page_geometry(self) -> PageGeometry:
        return PageGeometry(num_layers=self.num_layers, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)


def load_model_config(source: ModelSource) -> ModelConfig:
    """Reads headers only, never weights: some 50 ms for a vocabulary of 49,152.

    Raises:
        ModelError: names the file, the field, and what Weir supports.
    """
    if source.kind is ModelKind.GGUF:
        return config_from_gguf(read_gguf(source.path))
    return _config_from_hf(source.path)


def config_from_gguf(gguf: GgufFile) -> ModelConfig:
    """From the metadata of a GGUF file."""
    architecture = gguf.get("general.architecture", str)
    if architecture != _ARCHITECTURE:
        raise ModelError(f"{gguf.path}: architecture {architecture!r}; Weir serves {_ARCHITECTURE!r}")
    hidden_size = gguf.get("llama.embedding_length", int)
    num_heads = gguf.get("llama.attention.head_count", int)
    head_dim = gguf.find("llama.attention.key_length", int, hidden_size // max(num_heads, 1)) or 0
    _refuse_gguf_variants(gguf, head_dim)
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{gguf.path}: has no matrix token_embd.weight")
    return ModelConfig(
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=gguf.get("llama.feed_forward_length", int),
        num_layers=gguf.get("llama.block_count", int),
        num_heads=num_heads,
        num_kv_heads=gguf.find("llama.attention.head_count_kv", int, num_heads) or 0,
        head_dim=head_dim,
        rms_norm_eps=gguf.get("llama.attention.layer_norm_rms_epsilon", float),
        rope_theta=gguf.find("llama.rope.freq_base", float, 10_000.0) or 0.0,
        max_context_tokens=gguf.get("llama.context_length", int),
        tie_word_embeddings="output.weight" not in gguf.tensors,
        eos_token_ids=_gguf_eos_ids(gguf),
        bos_token_id=gguf.find("tokenizer.ggml.bos_token_id", int),
    )


def _refuse_gguf_variants(gguf: GgufFile, head_dim: int) -> None:
    rope_dimensions = gguf.find("llama.rope.dimension_count", int, head_dim)
    if rope_dimensions != head_dim:
        raise ModelError(f"{gguf.path}: partial rotary embedding ({rope_dimensions} of {head_dim}) is not supported")
    scaling = gguf.find("llama.rope.scaling.type", str, "none")
    if scaling != "none" or "rope_freqs.weight" in gguf.tensors:
        raise ModelError(f"{gguf.path}: rotary scaling (llama.rope.scaling.type {scaling!r}) is not supported")
    if gguf.find("llama.expert_count", int, 0):
        raise ModelError(f"{gguf.path}: mixtures of experts (llama.expert_count) are not supported")


def _gguf_eos_ids(gguf: GgufFile) -> tuple[int, ...]:
    found = (gguf.find(f"tokenizer.ggml.{name}_token_id", int) for name in ("eos", "eot"))
    return tuple(dict.fromkeys(token_id for token_id in found if token_id is not None))


def _config_from_hf(folder: Path) -> ModelConfig:
    config = _HfConfig(folder / "config.json")
    model_type = config.fields.get("model_type")
    if model_type != _ARCHITECTURE:
        raise ModelError(f"{config.path}: model_type {model_type!r}; Weir serves {_ARCHITECTURE!r}")
    _refuse_hf_variants(config)
    num_heads = config.integer("num_attention_heads")
    hidden_size = config.integer("hidden_size")
    return ModelConfig(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", num_heads),
        head_dim=config.integer("head_dim", hidden_size // max(num_heads, 1)),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope_theta=config.rope_theta(),
        max_context_tokens=config.integer("max_position_embeddings"),
        tie_word_embeddings=config.fields.get("tie_word_embeddings") is True,
        eos_token_ids=_hf_eos_ids(folder, config),
        bos_token_id=config.find_integer("bos_token_id"),
    )


def _refuse_hf_variants(config: "_HfConfig") -> None:
    for name, supported in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        value = config.fields.get(name, supported)
        if value != supported:
            raise ModelError(f"{config.path}: {name} {value!r} is not supported, only {supported!r}")
    rope = config.rope_parameters()
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        raise ModelError(f"{config.path}: rotary scaling {rope_type!r} is not supported, only 'default'")


def _hf_eos_ids(folder: Path, config: "_HfConfig") -> tuple[int, ...]:
    """Those of generation_config.json, which knows the chat's end, where there is one."""
    generation = folder / "generation_config.json"
    found = _HfConfig(generation).fields.get("eos_token_id") if generation.is_file() else None
    if found is None:
        found = config.fields.get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(token_id, int) for token_id in ids):
        raise ModelError(f"{folder}: eos_token_id is {found!r}, expected an integer or a list of integers")
    return tuple(ids)


class _HfConfig:
    """A JSON object whose fields are checked as they are read."""

    def __init__(self, path: Path) -> None:
        try:
            fields = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be read as JSON ({error})") from error
        if not isinstance(fields, dict):
            raise ModelError(f"{path}: expected a JSON object, found {type(fields).__name__}")
        self.path = path
        self.fields: Mapping[str, object] = fields

    def find_integer(self, name: str) -> int | None:
        value = self.fields.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ModelError(f"{self.path}: {name} is {value!r}, expected an integer")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.find_integer(name)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self.path}: has no {name}")
        return value

    def number(self, name: str, default: float) -> float:
        return self._as_number(name, self.fields.get(name, default))

    def rope_parameters(self) -> Mapping[str, object]:
        """`rope_parameters` is what transformers 5 writes, `rope_scaling` what older versions wrote."""
        for name in ("rope_parameters", "rope_scaling"):
            value = self.fields.get(name)
            if value is not None:
                if not isinstance(value, dict):
                    raise ModelError(f"{self.path}: {name} is {value!r}, expected an object")
                return value
        return {}

    def rope_theta(self) -> float:
        value = self.rope_parameters().get("rope_theta", self.fields.get("rope_theta", 10_000.0))
        return self._as_number("rope_theta", value)

    def _as_number(self, name: str, value: object) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelError(f"{self.path}: {name} is {value!r}, expected a number")
        return float(value)

"""From a model's files to its configuration, headers only: the metadata of a GGUF file, or config.json and
generation_config.json of a Hugging Face folder.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from weir.model.architecture import GivenScaling, LinearScaling, Llama3Scaling, ModelConfig, RotaryScaling
from weir.model.errors import ModelError
from weir.model.files.dummy import shape_named
from weir.model.files.gguf import GgufFile, read_gguf
from weir.model.files.source import DUMMY_PREFIX, ModelKind, ModelSource

_GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Values of `general.architecture`. Mistral's files say llama."""
_ROPE_FREQS = "rope_freqs.weight"
_F32 = 0
_HF_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type`."""
# What transformers takes where config.json says nothing.
_MISTRAL_WINDOW = 4096
_QWEN3_HEAD_DIM = 128


def load_model_config(source: ModelSource) -> ModelConfig:
    """Reads headers only, never weights, and no vocabulary.

    A model with a sliding window (Mistral 7B v0.1: 4096 tokens of 32,768) is served up to that window, within which it
    attends as any other: `max_context_tokens` is the smaller of the two.

    Raises:
        ModelError: names the file, the field, and what Weir supports.
    """
    if source.kind is ModelKind.GGUF:
        return _config_from_gguf(read_gguf(source.path, with_texts=False))
    if source.kind is ModelKind.DUMMY:
        return shape_named(source.name.removeprefix(DUMMY_PREFIX))
    return _config_from_hf(source.path)


def check_gguf_header(gguf: GgufFile) -> None:
    """All that can be refused before the tensors are there. Raises ModelError, as `load_model_config` does."""
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


def _config_from_gguf(gguf: GgufFile) -> ModelConfig:
    """Raises ModelError: names the file, the field, and what Weir serves."""
    fields = _read_gguf_fields(gguf)
    hidden_size, num_heads, head_dim = fields.hidden_size, fields.num_heads, fields.head_dim
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
        max_context_tokens=_gguf_context_tokens(fields),
        tie_word_embeddings="output.weight" not in gguf.tensors,
        eos_token_ids=_gguf_eos_ids(gguf),
        bos_token_id=gguf.find("tokenizer.ggml.bos_token_id", int),
        query_key_value_bias="blk.0.attn_q.bias" in gguf.tensors,
        attention_output_bias="blk.0.attn_output.bias" in gguf.tensors,
        query_key_norm="blk.0.attn_q_norm.weight" in gguf.tensors,
        rotary_scaling=_gguf_rotary_scaling(fields, head_dim),
    )


class _GgufFields:
    """Metadata under the architecture's prefix."""

    def __init__(self, gguf: GgufFile, architecture: str) -> None:
        self.gguf = gguf
        self._architecture = architecture

    @property
    def hidden_size(self) -> int:
        return self.integer("embedding_length")

    @property
    def num_heads(self) -> int:
        return self.integer("attention.head_count")

    @property
    def head_dim(self) -> int:
        return self.integer("attention.key_length", self.hidden_size // max(self.num_heads, 1))

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


def _refuse_gguf_variants(fields: _GgufFields, head_dim: int) -> None:
    path = fields.gguf.path
    for name in ("rope.dimension_count", "attention.value_length"):
        found = fields.integer(name, head_dim)
        if found != head_dim:
            raise ModelError(f"{path}: {fields.key(name)} is {found}; Weir serves {head_dim}, the size of a head, only")
    if fields.integer("expert_count", 0):
        raise ModelError(f"{path}: mixtures of experts ({fields.key('expert_count')}) are not supported")


def _gguf_context_tokens(fields: _GgufFields) -> int:
    """Up to its sliding window a model attends to everything, and so does Weir."""
    trained = fields.integer("context_length")
    window = fields.integer("attention.sliding_window", 0)
    return min(trained, window) if window > 0 else trained


def _gguf_rotary_scaling(fields: _GgufFields, head_dim: int) -> RotaryScaling | None:
    factor = _linear_factor(fields)
    divisors = _divisors(fields.gguf, head_dim)
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


def _divisors(gguf: GgufFile, head_dim: int) -> tuple[float, ...] | None:
    tensor = gguf.tensors.get(_ROPE_FREQS)
    if tensor is None:
        return None
    if tensor.type_id != _F32 or tensor.shape != (head_dim // 2,):
        raise ModelError(
            f"{gguf.path}: {_ROPE_FREQS} has type {tensor.type_id} and shape {list(tensor.shape)}, "
            f"expected F32 of shape [{head_dim // 2}]"
        )
    if tensor.offset + head_dim // 2 * np.dtype("<f4").itemsize > gguf.path.stat().st_size:
        raise ModelError(f"{gguf.path}: cut off inside tensor {_ROPE_FREQS}")
    values = np.fromfile(gguf.path, dtype="<f4", count=head_dim // 2, offset=tensor.offset)
    return tuple(values.tolist())


def _gguf_eos_ids(gguf: GgufFile) -> tuple[int, ...]:
    found = (gguf.find(f"tokenizer.ggml.{name}_token_id", int) for name in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(token_id for token_id in found if token_id is not None))


def _config_from_hf(folder: Path) -> ModelConfig:
    """Raises ModelError: names the file, the field, its value, and what Weir serves."""
    config = _HfConfig(folder / "config.json")
    model_type = config.fields.get("model_type")
    if model_type not in _HF_MODEL_TYPES:
        raise ModelError(
            f"{config.path}: model_type {model_type!r}; Weir serves {', '.join(map(repr, _HF_MODEL_TYPES))}"
        )
    _refuse_hf_variants(config)
    num_heads = config.integer("num_attention_heads")
    hidden_size = config.integer("hidden_size")
    # one flag is for all four projections; Qwen2 has no flag and biases in three
    has_bias = model_type in {"llama", "qwen3"} and config.flag("attention_bias")
    default_head_dim = _QWEN3_HEAD_DIM if model_type == "qwen3" else hidden_size // max(num_heads, 1)
    return ModelConfig(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", num_heads),
        head_dim=config.integer("head_dim", default_head_dim),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope_theta=config.rope_theta(),
        max_context_tokens=_hf_context_tokens(config),
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        eos_token_ids=_hf_eos_ids(folder, config),
        bos_token_id=config.find_integer("bos_token_id"),
        query_key_value_bias=has_bias or model_type == "qwen2",
        attention_output_bias=has_bias,
        query_key_norm=model_type == "qwen3",
        rotary_scaling=_hf_rotary_scaling(config),
    )


def _refuse_hf_variants(config: "_HfConfig") -> None:
    wanted: list[tuple[str, object]] = [("hidden_act", "silu"), ("mlp_bias", False), ("partial_rotary_factor", 1.0)]
    if config.fields["model_type"] == "mistral":
        wanted.append(("attention_bias", False))
    for name, supported in wanted:
        value = config.fields.get(name, config.rope_parameters().get(name, supported))
        if value is not None and value != supported:
            raise ModelError(f"{config.path}: {name} {value!r} is not supported, only {supported!r}")
    quantization = config.fields.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ModelError(
            f"{config.path}: quantization_config.quant_method {method!r} is not supported; Weir reads folders of "
            "float32, float16 and bfloat16 weights, and quantized weights from GGUF files"
        )


def _hf_context_tokens(config: "_HfConfig") -> int:
    """Up to its sliding window a model attends to everything, and so does Weir: longer contexts are not served."""
    trained = config.integer("max_position_embeddings")
    window = _sliding_window(config)
    return trained if window is None else min(trained, window)


def _sliding_window(config: "_HfConfig") -> int | None:
    match config.fields["model_type"]:
        case "mistral":
            return config.find_integer("sliding_window") if "sliding_window" in config.fields else _MISTRAL_WINDOW
        case "qwen2" | "qwen3" if config.flag("use_sliding_window"):
            first_windowed_layer = config.integer("max_window_layers", 0)
            has_window = first_windowed_layer < config.integer("num_hidden_layers")
            return config.find_integer("sliding_window") if has_window else None
    return None


def _hf_rotary_scaling(config: "_HfConfig") -> RotaryScaling | None:
    rope = config.rope_parameters()
    match rope.get("rope_type", rope.get("type", "default")):
        case "default":
            return None
        case "linear":
            return LinearScaling(config.rope_number("factor"))
        case "llama3":
            return Llama3Scaling(
                factor=config.rope_number("factor"),
                low_freq_factor=config.rope_number("low_freq_factor"),
                high_freq_factor=config.rope_number("high_freq_factor"),
                original_context_tokens=round(config.rope_number("original_max_position_embeddings")),
            )
        case other:
            raise ModelError(
                f"{config.path}: rotary scaling rope_type {other!r} is not supported, "
                "only 'default', 'linear' and 'llama3'"
            )


def _hf_eos_ids(folder: Path, config: "_HfConfig") -> tuple[int, ...]:
    """Those of generation_config.json, which knows the chat's end, where there is one."""
    generation = folder / "generation_config.json"
    found = _HfConfig(generation).fields.get("eos_token_id") if generation.is_file() else None
    if found is None:
        found = config.fields.get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(token_id, int) for token_id in ids):
        raise ModelError(f"{folder}: eos_token_id is {found!r}, expected an integer or a list of integers")
    return tuple(dict.fromkeys(ids))


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

    def flag(self, name: str) -> bool:
        """False where it is missing, as in transformers' classes of all these architectures."""
        value = self.fields.get(name)
        if value is not None and not isinstance(value, bool):
            raise ModelError(f"{self.path}: {name} is {value!r}, expected true or false")
        return value is True

    def rope_parameters(self) -> Mapping[str, object]:
        """`rope_parameters` is what transformers 5 writes, `rope_scaling` what older versions wrote."""
        for name in ("rope_parameters", "rope_scaling"):
            value = self.fields.get(name)
            if value is not None:
                if not isinstance(value, dict):
                    raise ModelError(f"{self.path}: {name} is {value!r}, expected an object")
                return value
        return {}

    def rope_number(self, name: str) -> float:
        rope = self.rope_parameters()
        if name not in rope:
            raise ModelError(f"{self.path}: rotary scaling has no {name}")
        return self._as_number(name, rope[name])

    def rope_theta(self) -> float:
        value = self.rope_parameters().get("rope_theta", self.fields.get("rope_theta", 10_000.0))
        return self._as_number("rope_theta", value)

    def _as_number(self, name: str, value: object) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelError(f"{self.path}: {name} is {value!r}, expected a number")
        return float(value)

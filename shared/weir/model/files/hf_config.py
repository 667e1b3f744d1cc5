"""A model's configuration from config.json and generation_config.json of a Hugging Face folder."""

import json
from collections.abc import Mapping
from pathlib import Path

from weir.model.architecture import LinearScaling, Llama3Scaling, ModelConfig, RotaryScaling
from weir.model.errors import ModelError

MODEL_TYPES = ("llama", "mistral", "qwen2")
"""Values of `model_type`."""
_MISTRAL_WINDOW = 4096  # what transformers takes where config.json says nothing


def config_from_hf(folder: Path) -> ModelConfig:
    """Raises ModelError: names the file, the field, its value, and what Weir serves."""
    config = _HfConfig(folder / "config.json")
    model_type = config.fields.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ModelError(f"{config.path}: model_type {model_type!r}; Weir serves {', '.join(map(repr, MODEL_TYPES))}")
    _refuse_variants(config)
    num_heads = config.integer("num_attention_heads")
    hidden_size = config.integer("hidden_size")
    # Llama's one flag is for all four projections; Qwen2 has no flag and biases in three
    has_llama_bias = model_type == "llama" and config.flag("attention_bias")
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
        max_context_tokens=_max_context_tokens(config),
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        eos_token_ids=_eos_ids(folder, config),
        bos_token_id=config.find_integer("bos_token_id"),
        query_key_value_bias=has_llama_bias or model_type == "qwen2",
        attention_output_bias=has_llama_bias,
        rotary_scaling=_rotary_scaling(config),
    )


def _refuse_variants(config: "_HfConfig") -> None:
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


def _max_context_tokens(config: "_HfConfig") -> int:
    """Up to its sliding window a model attends to everything, and so does Weir: longer contexts are not served."""
    trained = config.integer("max_position_embeddings")
    window = _sliding_window(config)
    return trained if window is None else min(trained, window)


def _sliding_window(config: "_HfConfig") -> int | None:
    match config.fields["model_type"]:
        case "mistral":
            return config.find_integer("sliding_window") if "sliding_window" in config.fields else _MISTRAL_WINDOW
        case "qwen2" if config.flag("use_sliding_window"):
            first_windowed_layer = config.integer("max_window_layers", 0)
            has_window = first_windowed_layer < config.integer("num_hidden_layers")
            return config.find_integer("sliding_window") if has_window else None
    return None


def _rotary_scaling(config: "_HfConfig") -> RotaryScaling | None:
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


def _eos_ids(folder: Path, config: "_HfConfig") -> tuple[int, ...]:
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
        """False where it is missing, as in transformers' classes of all three architectures."""
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

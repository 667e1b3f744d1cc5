"""The configuration of a Hugging Face folder: config.json and generation_config.json."""

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from weir.model.architecture import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ModelConfig,
    RotaryScaling,
    SlidingWindow,
)
from weir.model.errors import ModelError
from weir.model.files.embedding_scale import FloatType, embedding_scale
from weir.model.files.quantization import quant_scheme

_HF_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3")
"""Values of `model_type`."""
# What transformers takes where config.json says nothing.
_MISTRAL_WINDOW = 4096
_HEAD_DIMS = {"qwen3": 128, "gemma2": 256, "gemma3_text": 256}
_GEMMA_WINDOW, _GEMMA_SCALAR = 4096, 256
_GEMMA_PERIODS = {"gemma2": 2, "gemma3_text": 6}
_GEMMA2_ATTENTION_SOFTCAP, _GEMMA2_LOGIT_SOFTCAP = 50.0, 30.0
_GEMMA3_THETA, _GEMMA3_LOCAL_THETA = 1e6, 1e4
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


def config_from_hf(folder: Path) -> ModelConfig:
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
    read = ModelConfig(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", num_heads),
        head_dim=config.integer("head_dim", _HEAD_DIMS.get(str(model_type), hidden_size // max(num_heads, 1))),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope_theta=config.rope_theta(),
        max_context_tokens=config.integer("max_position_embeddings"),
        tie_word_embeddings=config.flag("tie_word_embeddings", default=config.is_gemma),
        eos_token_ids=_hf_eos_ids(folder, config),
        bos_token_id=config.find_integer("bos_token_id"),
        query_key_value_bias=has_bias or model_type == "qwen2",
        attention_output_bias=has_bias,
        query_key_norm=model_type in {"qwen3", "gemma3_text"},
        rotary_scaling=_hf_rotary_scaling(config),
        rotary_dim=_rotary_dim(config, hidden_size // max(num_heads, 1)),
    )
    read = replace(read, window=_sliding_window(config))  # whose layers are as many as it may have
    return _with_gemma(read, config) if config.is_gemma else read


def _with_gemma(read: ModelConfig, config: "_HfConfig") -> ModelConfig:
    scalar = config.number("query_pre_attn_scalar", _GEMMA_SCALAR)
    return replace(
        read,
        query_pre_attn_scalar=None if scalar == read.head_dim else scalar,
        embedding_scale=embedding_scale(read.hidden_size, config.float_type()),
        activation="gelu_tanh",
        post_norms=True,
        offset_norms=True,
        attention_softcap=config.softcap("attn_logit_softcapping", _GEMMA2_ATTENTION_SOFTCAP),
        logit_softcap=config.softcap("final_logit_softcapping", _GEMMA2_LOGIT_SOFTCAP),
    )


def _rotary_dim(config: "_HfConfig", head_dim: int) -> int | None:
    """None: all of a head rotates."""
    if config.fields["model_type"] != "phi3":
        return None
    factor = config.rope_parameters().get("partial_rotary_factor", config.fields.get("partial_rotary_factor", 1.0))
    found = int(head_dim * config.as_number("partial_rotary_factor", factor))
    return None if found == head_dim else found


def _refuse_hf_variants(config: "_HfConfig") -> None:
    wanted: list[tuple[str, object]] = [("mlp_bias", False)]
    if config.fields["model_type"] != "phi3":
        wanted.append(("partial_rotary_factor", 1.0))
    if config.is_gemma:
        wanted += [("hidden_activation", "gelu_pytorch_tanh"), ("use_bidirectional_attention", False)]
    else:
        wanted.append(("hidden_act", "silu"))
    if config.fields["model_type"] in {"mistral", "gemma2", "gemma3_text", "phi3"}:
        wanted.append(("attention_bias", False))
    for name, supported in wanted:
        value = config.fields.get(name, config.rope_parameters().get(name, supported))
        if value is not None and value != supported:
            raise ModelError(f"{config.path}: {name} {value!r} is not supported, only {supported!r}")
    quant_scheme(config.path, config.fields)


def _sliding_window(config: "_HfConfig") -> SlidingWindow | None:
    """None, too, where no layer has one, or none that the context is longer than."""
    num_layers = config.integer("num_hidden_layers")
    num_tokens: int | None = None
    layers = tuple(True for _ in range(num_layers))
    theta: float | None = None
    match config.fields["model_type"]:
        case "mistral":
            num_tokens = config.find_integer("sliding_window") if "sliding_window" in config.fields else _MISTRAL_WINDOW
        case "phi3":
            num_tokens = config.find_integer("sliding_window")
        case "qwen2" | "qwen3" if config.flag("use_sliding_window"):
            num_tokens = config.find_integer("sliding_window")
            first = config.integer("max_window_layers", 0)
            layers = config.layers_with_window(tuple(layer >= first for layer in range(num_layers)))
        case "gemma2" | "gemma3_text" as gemma:
            num_tokens = config.integer("sliding_window", _GEMMA_WINDOW)
            period = max(config.integer("sliding_window_pattern", _GEMMA_PERIODS[gemma]), 1)
            layers = config.layers_with_window(tuple((layer + 1) % period != 0 for layer in range(num_layers)))
            theta = config.local_rope_theta() if gemma == "gemma3_text" else None
    if num_tokens is None or not any(layers):
        return None
    if num_tokens >= config.integer("max_position_embeddings") and theta is None:
        return None
    return SlidingWindow(num_tokens, layers, theta)


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
        # what Phi's first files called so is the same
        case "longrope" | "su" if config.fields["model_type"] == "phi3":
            return _longrope(config)
        case other:
            raise ModelError(
                f"{config.path}: rotary scaling rope_type {other!r} is not supported, "
                "only 'default', 'linear' and 'llama3'"
            )


def _longrope(config: "_HfConfig") -> LongRopeScaling:
    """The magnitude is by how much the context grew, as transformers has it."""
    rope = config.rope_parameters()
    trained = config.integer("max_position_embeddings")
    original = rope.get("original_max_position_embeddings", config.fields.get("original_max_position_embeddings"))
    original_tokens = int(config.as_number("original_max_position_embeddings", original))
    factor = config.as_number("factor", rope.get("factor") or trained / max(original_tokens, 1))
    magnitude = math.sqrt(1 + math.log(factor) / math.log(original_tokens)) if factor > 1 < original_tokens else 1.0
    given = rope.get("attention_factor")
    return LongRopeScaling(
        short_divisors=config.rope_numbers("short_factor"),
        long_divisors=config.rope_numbers("long_factor"),
        original_context_tokens=original_tokens,
        magnitude=magnitude if given is None else config.as_number("attention_factor", given),
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
        except (OSError, ValueError, RecursionError) as error:
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
        return self.as_number(name, self.fields.get(name, default))

    @property
    def is_gemma(self) -> bool:
        return self.fields.get("model_type") in {"gemma2", "gemma3_text"}

    def softcap(self, name: str, of_gemma2: float) -> float | None:
        """null means none. Where it is missing, Gemma 3 has none."""
        value = self.fields.get(name, None if self.is_gemma3 else of_gemma2)
        return None if value is None else self.as_number(name, value)

    @property
    def is_gemma3(self) -> bool:
        return self.fields.get("model_type") == "gemma3_text"

    def float_type(self) -> FloatType:
        """Of the weights. `dtype` is what transformers 5 writes, `torch_dtype` what older versions wrote."""
        value = self.fields.get("dtype", self.fields.get("torch_dtype"))
        return "bfloat16" if value == "bfloat16" else "float16" if value == "float16" else "float32"

    def layers_with_window(self, otherwise: tuple[bool, ...]) -> tuple[bool, ...]:
        """By `layer_types`, where config.json has them."""
        value = self.fields.get("layer_types")
        if value is None:
            return otherwise
        if not isinstance(value, list) or not all(kind in (_LOCAL, _GLOBAL) for kind in value):
            raise ModelError(f"{self.path}: layer_types is {value!r}, expected a list of {_LOCAL!r} and {_GLOBAL!r}")
        return tuple(kind == _LOCAL for kind in value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Missing ones are False in transformers' classes of most architectures."""
        value = self.fields.get(name, default)
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
                return self._of_global_layers(name, value)
        return {}

    def _of_global_layers(self, name: str, rope: Mapping[str, object]) -> Mapping[str, object]:
        """transformers 5 writes one object a kind of layer where they differ."""
        value = rope.get(_GLOBAL, rope)
        if not isinstance(value, dict):
            raise ModelError(f"{self.path}: {name}.{_GLOBAL} is {value!r}, expected an object")
        return value

    def local_rope_theta(self) -> float:
        """Of Gemma's layers with a window."""
        parameters = self.fields.get("rope_parameters")
        local = parameters.get(_LOCAL) if isinstance(parameters, dict) else None
        if isinstance(local, dict):
            kind = local.get("rope_type", "default")
            if kind != "default":
                raise ModelError(f"{self.path}: rope_parameters.{_LOCAL}.rope_type {kind!r} is not supported")
            return self.as_number("rope_theta", local.get("rope_theta", _GEMMA3_LOCAL_THETA))
        return self.number("rope_local_base_freq", _GEMMA3_LOCAL_THETA)

    def rope_number(self, name: str) -> float:
        rope = self.rope_parameters()
        if name not in rope:
            raise ModelError(f"{self.path}: rotary scaling has no {name}")
        return self.as_number(name, rope[name])

    def rope_numbers(self, name: str) -> tuple[float, ...]:
        value = self.rope_parameters().get(name)
        if not isinstance(value, list):
            raise ModelError(f"{self.path}: rotary scaling's {name} is {value!r}, expected a list of numbers")
        return tuple(self.as_number(name, number) for number in value)

    def rope_theta(self) -> float:
        default = _GEMMA3_THETA if self.is_gemma3 else 10_000.0
        value = self.rope_parameters().get("rope_theta", self.fields.get("rope_theta", default))
        return self.as_number("rope_theta", value)

    def as_number(self, name: str, value: object) -> float:
        largest = sys.float_info.max
        if not isinstance(value, int | float) or isinstance(value, bool) or not -largest <= value <= largest:
            raise ModelError(f"{self.path}: {name} is {value!r:.60}, expected a number")
        return float(value)

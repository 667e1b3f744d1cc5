"""The numbers that define a decoder, the shapes of its tensors, and its rotary frequencies. numpy only; files are read
elsewhere (`weir.model.files.config`).
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from weir.kv.geometry import PageGeometry
from weir.model.errors import ModelError

Frequencies = npt.NDArray[np.float32]

_POSITIVE = (
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
)
_MOST = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_layers": 1 << 10,
    "num_heads": 1 << 12,
    "head_dim": 1 << 12,
    "max_context_tokens": (1 << 31) - 1,
}
"""Far above any model's: names and frequencies are made of them before a file is known to have the tensors."""


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Every position counts 1 / `factor`."""

    factor: float

    def __post_init__(self) -> None:
        _check_positive("linear rotary scaling", factor=self.factor)


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Slow frequencies are divided by `factor`, fast ones kept, with a ramp between (Llama 3.1).

    A frequency is slow if it turns less than `low_freq_factor` times in `original_context_tokens`, and fast if it turns
    more than `high_freq_factor` times.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_tokens: int

    def __post_init__(self) -> None:
        _check_positive(
            "llama3 rotary scaling",
            factor=self.factor,
            low_freq_factor=self.low_freq_factor,
            original_context_tokens=self.original_context_tokens,
        )
        if self.high_freq_factor <= self.low_freq_factor:
            raise ModelError(
                f"llama3 rotary scaling: high_freq_factor is {self.high_freq_factor}, "
                f"expected more than low_freq_factor, {self.low_freq_factor}"
            )


@dataclass(frozen=True, slots=True)
class GivenScaling:
    """A divisor a frequency, head_dim / 2 of them: how GGUF files write llama3 scaling (`rope_freqs.weight`)."""

    divisors: tuple[float, ...]

    def __post_init__(self) -> None:
        for divisor in self.divisors:
            _check_positive("rotary scaling given by divisors", divisor=divisor)


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """Divisors for contexts of up to `original_context_tokens` and for longer ones, one a frequency (Ding et al.:
    "LongRoPE", 2024). Cosines and sines are multiplied with `magnitude`.

    `is_long` is chosen once, by the longest context that is served: keys in pages keep what they mean while a sequence
    grows. (transformers changes to the others in mid-sequence.)
    """

    short_divisors: tuple[float, ...]
    long_divisors: tuple[float, ...]
    original_context_tokens: int
    magnitude: float
    is_long: bool = False

    def __post_init__(self) -> None:
        _check_positive("longrope rotary scaling", original=self.original_context_tokens, magnitude=self.magnitude)
        for divisor in (*self.short_divisors, *self.long_divisors):
            _check_positive("longrope rotary scaling", divisor=divisor)
        if len(self.short_divisors) != len(self.long_divisors):
            raise ModelError(
                f"longrope rotary scaling: {len(self.short_divisors)} short factors and {len(self.long_divisors)} "
                "long ones, expected as many"
            )

    @property
    def divisors(self) -> tuple[float, ...]:
        return self.long_divisors if self.is_long else self.short_divisors


RotaryScaling = LinearScaling | Llama3Scaling | GivenScaling | LongRopeScaling


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Layers that are marked attend to the last `num_tokens` positions only, a query's own among them.

    With a `rope_theta` they rotate by frequencies of their own, which nothing scales.
    """

    num_tokens: int
    layers: tuple[bool, ...]
    rope_theta: float | None = None

    def __post_init__(self) -> None:
        _check_positive("sliding window", num_tokens=self.num_tokens)
        if self.rope_theta is not None:
            _check_positive("sliding window", rope_theta=self.rope_theta)


Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama kind (Llama, Mistral, Qwen2, Qwen3), and what Gemma and Phi-3 have beside it.

    The two flags of biases say that the query, key and value projections (all three) and the output projection of
    attention add one; `query_key_norm`, that each head of queries and keys is normed before it is rotated, by weights
    that all heads share. `rotary_scaling` None: frequencies as `rope_theta` gives them.

    `window` None: every layer attends to everything. `query_pre_attn_scalar`: products of queries and keys are divided
    by its square root, None: by that of `head_dim`. `embedding_scale`: what embeddings are multiplied with.
    `activation` is that of the MLP's gate. `post_norms`: what attention and the MLP give is normed before it is added.
    `offset_norms`: files may keep norms as their distance from 1; loaded ones are multiplied with as they are, and stay
    in fp32. `rotary_dim`: of a head, so many dimensions rotate, None: all. Softcaps: scores of attention, and logits,
    x become cap * tanh(x / cap).
    """

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
    query_key_value_bias: bool = False
    attention_output_bias: bool = False
    query_key_norm: bool = False
    rotary_scaling: RotaryScaling | None = None
    window: SlidingWindow | None = None
    query_pre_attn_scalar: float | None = None
    embedding_scale: float = 1.0
    activation: Activation = "silu"
    post_norms: bool = False
    offset_norms: bool = False
    rotary_dim: int | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        _check_positive("model configuration", **{name: getattr(self, name) for name in _POSITIVE})
        for name, most in _MOST.items():
            if getattr(self, name) > most:
                raise ModelError(f"model configuration: {name} is {getattr(self, name)}, expected at most {most}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"model configuration: num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ModelError(f"model configuration: head_dim is {self.head_dim}, expected an even number")
        if not 0 < self.num_rotated <= self.head_dim or self.num_rotated % 2:
            raise ModelError(
                f"model configuration: rotary_dim is {self.num_rotated}, expected an even number of at most head_dim, "
                f"{self.head_dim}"
            )
        scaling = self.rotary_scaling
        if isinstance(scaling, GivenScaling | LongRopeScaling) and len(scaling.divisors) != self.num_rotated // 2:
            raise ModelError(
                f"model configuration: {len(scaling.divisors)} divisors of rotary frequencies, "
                f"expected {self.num_rotated // 2}, half of what rotates of a head"
            )
        for name in ("attention_softcap", "logit_softcap", "query_pre_attn_scalar"):
            if getattr(self, name) is not None:
                _check_positive("model configuration", **{name: getattr(self, name)})
        if self.window is not None and len(self.window.layers) != self.num_layers:
            raise ModelError(
                f"model configuration: the sliding window marks {len(self.window.layers)} layers, "
                f"expected num_layers = {self.num_layers}"
            )

    def context_within(self, max_context_tokens: int) -> int:
        """`max_context_tokens`, or the model's own context for 0. Raises ModelError for more than the model has."""
        if max_context_tokens > self.max_context_tokens:
            raise ModelError(
                f"max_context_tokens {max_context_tokens}: the model's context is {self.max_context_tokens}"
            )
        return max_context_tokens or self.max_context_tokens

    def served_up_to(self, max_context_tokens: int) -> "ModelConfig":
        """For contexts of at most so many tokens; 0: the model's own. Raises ModelError for more than the model has.

        The same but where rotary frequencies depend on it.
        """
        longest, scaling = self.context_within(max_context_tokens), self.rotary_scaling
        if not isinstance(scaling, LongRopeScaling):
            return self
        chosen = replace(scaling, is_long=longest > scaling.original_context_tokens)
        return replace(self, rotary_scaling=chosen, max_context_tokens=longest)

    @property
    def num_rotated(self) -> int:
        """Dimensions of a head that rotate."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def score_divisor(self) -> float:
        """Products of queries and keys are divided by its square root."""
        return self.head_dim if self.query_pre_attn_scalar is None else self.query_pre_attn_scalar

    def window_of(self, layer: int) -> int | None:
        """How many positions the layer attends to at most; None: to all."""
        window = self.window
        return window.num_tokens if window is not None and window.layers[layer] else None

    @property
    def longest_window(self) -> int | None:
        """How many positions any layer attends to at most; None: some attend to all."""
        window = self.window
        return window.num_tokens if window is not None and all(window.layers) else None

    @property
    def page_geometry(self) -> PageGeometry:
        return PageGeometry(num_layers=self.num_layers, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)


def _check_positive(what: str, **values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ModelError(f"{what}: {name} is {value}, expected more than 0, and finite")


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of a model of this configuration, in the order in which a forward pass needs them."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(config).items()}
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key, hidden),
        "self_attn.v_proj.weight": (key, hidden),
    }
    if config.query_key_value_bias:
        shapes |= {
            "self_attn.q_proj.bias": (query,),
            "self_attn.k_proj.bias": (key,),
            "self_attn.v_proj.bias": (key,),
        }
    if config.query_key_norm:
        shapes |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    shapes["self_attn.o_proj.weight"] = (hidden, query)
    if config.attention_output_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    shapes["post_attention_layernorm.weight"] = (hidden,)
    if config.post_norms:
        shapes["pre_feedforward_layernorm.weight"] = (hidden,)
    shapes |= {
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.post_norms:
        shapes["post_feedforward_layernorm.weight"] = (hidden,)
    return shapes


def mlp_norm_name(config: ModelConfig) -> str:
    """The norm before the MLP. Models with post-norms call what the others call so the norm behind attention."""
    return "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"


def local_rotary_frequencies(config: ModelConfig) -> Frequencies | None:
    """`rotary_frequencies` of layers with a window; None: those of all others."""
    window = config.window
    if window is None or window.rope_theta is None:
        return None
    return _unscaled(config.head_dim, window.rope_theta)


def partial_rotary_order(config: ModelConfig) -> npt.NDArray[np.intp] | None:
    """Where part of a head rotates: which of its dimensions stands where, `[head_dim]`. None: as in the files.

    Files have what rotates first. Scores do not change if queries and keys have their dimensions in another order, so
    they get one in which pairs are (i, i + head_dim / 2) as in other models; those that do not rotate turn by 0:

        file    | first of the pairs | second of the pairs | rest, first half | rest, second half |
        here    | first of the pairs | rest, first half | second of the pairs | rest, second half |
    """
    if config.num_rotated == config.head_dim:
        return None
    pairs, rotated, middle = config.num_rotated // 2, config.num_rotated, (config.num_rotated + config.head_dim) // 2
    bounds = ((0, pairs), (rotated, middle), (pairs, rotated), (middle, config.head_dim))
    return np.concatenate([np.arange(first, last, dtype=np.intp) for first, last in bounds])


def rotary_frequencies(config: ModelConfig) -> Frequencies:
    """Radians a position, fp32 `[head_dim / 2]`: pair i of a head, (i, i + head_dim / 2), turns by position times this.

    The same roundings as Hugging Face transformers (`modeling_rope_utils.py`): the angle at a late position would show
    any other.
    """
    rotating = _scaled(_unscaled(config.num_rotated, config.rope_theta), config)
    still = np.zeros((config.head_dim - config.num_rotated) // 2, np.float32)
    return np.concatenate([rotating, still])


def rotary_magnitudes(config: ModelConfig) -> Frequencies:
    """What the cosines and sines of each frequency are multiplied with, fp32 `[head_dim / 2]`."""
    scaling, magnitudes = config.rotary_scaling, np.ones(config.head_dim // 2, np.float32)
    if isinstance(scaling, LongRopeScaling):
        magnitudes[: config.num_rotated // 2] = scaling.magnitude
    return magnitudes


def _scaled(frequencies: Frequencies, config: ModelConfig) -> Frequencies:
    match config.rotary_scaling:
        case None:
            return frequencies
        case LinearScaling(factor):
            return np.divide(frequencies, factor, dtype=np.float32)
        case Llama3Scaling() as scaling:
            return _llama3(frequencies, scaling)
        case GivenScaling(divisors):
            return np.divide(frequencies, divisors, dtype=np.float32)
        case LongRopeScaling() as scaling:
            chosen = np.array(scaling.divisors, np.float32)
            by_longrope: Frequencies = np.float32(1.0) / (chosen * _powers(config.num_rotated, config.rope_theta))
            return by_longrope


def _unscaled(num_rotated: int, theta: float) -> Frequencies:
    frequencies: Frequencies = np.float32(1.0) / _powers(num_rotated, theta)
    return frequencies


def _powers(num_rotated: int, theta: float) -> Frequencies:
    exponents = np.arange(0, num_rotated, 2).astype(np.float32) / np.float32(num_rotated)
    powers: Frequencies = np.power(theta, exponents, dtype=np.float64).astype(np.float32)
    return powers


def _llama3(frequencies: Frequencies, scaling: Llama3Scaling) -> Frequencies:
    """`_compute_llama3_parameters` of transformers; first in meta-llama/llama-models, `apply_scaling`."""
    factor = np.float32(scaling.factor)
    turns = np.float32(scaling.original_context_tokens) / (np.float32(2 * math.pi) / frequencies)
    ramp = (turns - np.float32(scaling.low_freq_factor)) / np.float32(
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    ramped = (np.float32(1.0) - ramp) * frequencies / factor + ramp * frequencies
    slow, fast = turns < scaling.low_freq_factor, turns > scaling.high_freq_factor
    scaled: Frequencies = np.select([slow, fast], [frequencies / factor, frequencies], ramped).astype(np.float32)
    return scaled

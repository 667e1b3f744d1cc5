"""How fast each pair of a head turns with the position, scaled as the model asks for. numpy only."""

import math

import numpy as np
import numpy.typing as npt

from weir.model.architecture import GivenScaling, LinearScaling, Llama3Scaling, ModelConfig

Frequencies = npt.NDArray[np.float32]


def rotary_frequencies(config: ModelConfig) -> Frequencies:
    """Radians a position, fp32 `[head_dim / 2]`: pair i of a head, (i, i + head_dim / 2), turns by position times this.

    The same roundings as Hugging Face transformers (`modeling_rope_utils.py`): the angle at a late position would show
    any other.
    """
    exponents = np.arange(0, config.head_dim, 2).astype(np.float32) / np.float32(config.head_dim)
    powers = np.power(config.rope_theta, exponents, dtype=np.float64)
    frequencies: Frequencies = np.float32(1.0) / powers.astype(np.float32)
    match config.rotary_scaling:
        case None:
            return frequencies
        case LinearScaling(factor):
            return np.divide(frequencies, factor, dtype=np.float32)
        case Llama3Scaling() as scaling:
            return _llama3(frequencies, scaling)
        case GivenScaling(divisors):
            return np.divide(frequencies, divisors, dtype=np.float32)


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

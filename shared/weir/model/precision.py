"""Which arithmetic a model runs in. Nothing here imports torch or numba: every process of a stack may ask."""

from typing import Literal

from weir.model.architecture import ModelConfig
from weir.model.errors import ModelError

Precision = Literal["auto", "int8", "fp32"]
Arithmetic = Literal["int8", "fp32"]

PRECISION_HELP = (
    "Arithmetic of the model. int8: compiled kernels, same tokens in every batch; fp32: PyTorch; auto: int8."
)

_VERSIONS: dict[Arithmetic, int] = {"int8": 1, "fp32": 1}
"""Part of every digest: to be raised when results, or files of packed weights, change their bits."""
_GROUP = 32


def choose_arithmetic(precision: Precision, config: ModelConfig) -> Arithmetic:
    """`auto` is int8 where the model's shapes fit its kernels.

    Raises:
        ModelError: int8 was asked for and does not fit.
    """
    if precision == "fp32":
        return "fp32"
    obstacle = int8_obstacle(config)
    if obstacle and precision == "int8":
        raise ModelError(f"precision int8: {obstacle}; use --precision fp32 for this model")
    return "fp32" if obstacle else "int8"


def int8_obstacle(config: ModelConfig) -> str:
    """Why the int8 kernels cannot run the model; empty if they can."""
    inputs = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads * head_dim": config.num_heads * config.head_dim,
    }
    wrong = [f"{name} is {size}" for name, size in inputs.items() if size % _GROUP]
    return f"{', '.join(wrong)}, expected a multiple of {_GROUP}" if wrong else ""


def arithmetic_key(precision: Precision, config: ModelConfig) -> str:
    """What a digest has to say about arithmetic. Raises ModelError."""
    arithmetic = choose_arithmetic(precision, config)
    return f"{arithmetic} {_VERSIONS[arithmetic]}"

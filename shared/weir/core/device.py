"""Where workers compute, and in which arithmetic.

    cpu           in compiled kernels; pages lie in the segment, beside the tables
    cuda          in Triton kernels on GPU 0; pages lie in the GPU's memory
    interpreter   in the same Triton kernels, interpreted on the CPU; pages lie in memory of the host that is made,
                  handed out and mapped as a GPU's is. Slow: it runs the GPU path on machines without a GPU, for tests

Wherever pages lie, the tables and the sequence records are in the segment.

The arithmetic follows from the device and from what was asked for; the first one of a device is its `auto`:

    cpu           int8 (where the model's shapes fit), fp32     compiled kernels, PyTorch
    cuda          bf16, fp32, fp8, bf16-kv8, fp8-kv8            Triton kernels on GPU 0
    interpreter   fp32, fp8, fp8-kv8                            the same Triton kernels, interpreted on the CPU: a test
                                                                of the GPU path for machines without one, and slow

int8 gives a row the same bits in every batch; PyTorch's fp32 does not. Triton kernels do with `exact`, when the matrix
products are kernels too and not the library's.

fp8: matrices of the layers, and what they multiply, are E4M3 with a scale a row; sums are fp32.
kv8: keys and values in pages are int8, with a scale a head of a token.
All else is bf16 in both, in the interpreter fp16, for it multiplies no bf16.
"""

from collections.abc import Mapping
from typing import Literal

Device = Literal["cpu", "cuda", "interpreter"]
"""Of all workers of a host: they share its arena."""
Precision = Literal["auto", "int8", "fp32", "bf16", "fp8", "bf16-kv8", "fp8-kv8"]
Arithmetic = Literal["int8", "fp32", "bf16", "fp8", "bf16-kv8", "fp8-kv8"]

DEVICE_HELP = "Where workers compute: cpu, cuda (GPU 0) or interpreter (kernels for GPUs, on the CPU: slow, for tests)."
PRECISION_HELP = (
    "Arithmetic of the model. CPU: int8 (compiled kernels, same tokens in every batch) or fp32 (PyTorch); "
    "CUDA: bf16, fp32, fp8 (weights of one byte), bf16-kv8 or fp8-kv8 (pages of one byte); auto: the device's first."
)
EXACT_HELP = (
    "Rows do not depend on their batch, to the bit: on a GPU by matrix products that are slower than cuBLAS; "
    "int8 on a CPU is so with or without; fp32 there is refused."
)

ARITHMETIC_OF_DEVICE: Mapping[Device, tuple[Arithmetic, ...]] = {
    "cpu": ("int8", "fp32"),
    "cuda": ("bf16", "fp32", "fp8", "bf16-kv8", "fp8-kv8"),
    "interpreter": ("fp32", "fp8", "fp8-kv8"),
}


FP8_MATRICES: frozenset[Arithmetic] = frozenset({"fp8", "fp8-kv8"})
"""Those whose matrices are E4M3."""
INT8_PAGES: frozenset[Arithmetic] = frozenset({"bf16-kv8", "fp8-kv8"})
"""Those whose pages are int8 with scales."""


def check_precision(precision: Precision, device: Device) -> None:
    """Raises ValueError for a precision that the device has for no model."""
    known = ARITHMETIC_OF_DEVICE[device]
    if precision != "auto" and precision not in known:
        choice = ", ".join(known[:-1]) + f" or {known[-1]}"
        raise ValueError(f"precision {precision}: device {device} computes in {choice}; auto is {known[0]}")


def check_exact(exact: bool, precision: Precision, device: Device) -> None:
    """Raises ValueError where no model's rows are independent of their batch."""
    if exact and precision in FP8_MATRICES:
        raise ValueError(
            f"exact: precision {precision} has matrix products that depend on the batch; "
            "use precision bf16, bf16-kv8 or fp32, or leave exact out"
        )
    if exact and device == "cpu" and precision == "fp32":
        raise ValueError(
            "exact: precision fp32 on device cpu is computed by PyTorch, whose products depend on the batch; "
            "use precision int8, which is exact in any case, or leave exact out"
        )

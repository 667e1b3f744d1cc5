"""The sizes that kernels take: of heads, and of rows. Without torch or numba, for whoever only asks."""

CPU_HEAD_DIM_STEP = 8
"""A head's dimensions are a multiple: the kernels in LLVM IR take at least so many at a time."""

TRITON_HEAD_DIMS = (16, 256)
"""Least and most, both included."""

WIDEST_QUANTIZED_ROW = 32768
"""A program of a Triton kernel keeps a row in registers."""

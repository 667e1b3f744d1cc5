"""Root mean square normalization and quantization in one pass, on CPUs."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numpy.typing import NDArray

from weir.ops.cpu.quantize import WIDTH, emit_load_group, emit_quantize
from weir.ops.cpu.quantized_rows import GROUP, RECORD_BYTES
from weir.ops.simd.float import FLOAT, INT64, emit_constant, emit_fma, emit_horizontal, emit_splat, vector_type
from weir.ops.simd.jit import kernel, simd


@simd
def _rms_norm_quantize_row(
    typing_context: Any, inputs: Any, weight: Any, record: Any, num_groups: Any, epsilon: Any
) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        _emit_row(builder, *values)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, types.float32), codegen


def _emit_row(
    builder: ir.IRBuilder, inputs: ir.Value, weight: ir.Value, record: ir.Value, num_groups: ir.Value, epsilon: ir.Value
) -> None:
    def at(base: ir.Value, group: ir.Value, num_bytes: int) -> ir.Value:
        return builder.add(base, builder.mul(group, ir.Constant(INT64, num_bytes)))

    zero = emit_constant(vector_type(WIDTH), 0.0)
    squares = [cgutils.alloca_once_value(builder, zero) for _ in range(GROUP // WIDTH)]
    with cgutils.for_range(builder, num_groups, intp=INT64) as loop:
        for memory, vector in zip(squares, emit_load_group(builder, at(inputs, loop.index, GROUP * 4)), strict=True):
            builder.store(emit_fma(builder, vector, vector, builder.load(memory)), memory)
    lower, upper = (builder.load(memory) for memory in squares)
    total = emit_horizontal(builder, builder.fadd(lower, upper), builder.fadd)
    count = builder.sitofp(builder.mul(num_groups, ir.Constant(INT64, GROUP)), FLOAT)
    square_root = builder.module.declare_intrinsic("llvm.sqrt", [FLOAT])
    root = builder.call(square_root, [builder.fadd(builder.fdiv(total, count), epsilon)])
    factor = emit_splat(builder, builder.fdiv(ir.Constant(FLOAT, 1.0), root), WIDTH)
    with cgutils.for_range(builder, num_groups, intp=INT64) as loop:
        normed = [
            builder.fmul(builder.fmul(vector, factor), part)
            for vector, part in zip(
                emit_load_group(builder, at(inputs, loop.index, GROUP * 4)),
                emit_load_group(builder, at(weight, loop.index, GROUP * 4)),
                strict=True,
            )
        ]
        emit_quantize(builder, normed, at(record, loop.index, RECORD_BYTES))


@kernel
def rms_norm_quantize_range(
    inputs: NDArray[np.float32],
    weight: NDArray[np.float32],
    epsilon: float,
    rows: NDArray[np.uint8],
    first_row: int,
    last_row: int,
) -> None:
    """Rows [first_row, last_row) of x / sqrt(mean(x**2) + epsilon) * weight, quantized.

    `inputs` float32 [m, k], `weight` float32 [k], `rows` uint8 [m, row_bytes(k)], contiguous; nothing is checked here.
    """
    num_groups = inputs.shape[1] // GROUP
    for row in range(first_row, last_row):
        _rms_norm_quantize_row(
            inputs.ctypes.data + row * (inputs.shape[1] * 4),
            weight.ctypes.data,
            rows.ctypes.data + row * rows.shape[1],
            num_groups,
            np.float32(epsilon),
        )

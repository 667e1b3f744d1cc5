"""Root mean square normalization, and quantization or the sum with the residual stream in the same pass, on CPUs."""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numpy.typing import NDArray

from weir.ops.cpu.quantize import WIDTH, emit_load_group, emit_quantize
from weir.ops.cpu.quantized_rows import GROUP, RECORD_BYTES
from weir.ops.simd.float import (
    FLOAT,
    INT64,
    emit_constant,
    emit_fma,
    emit_horizontal,
    emit_splat,
    emit_store,
    vector_type,
)
from weir.ops.simd.jit import kernel, simd


@simd
def _rms_norm_quantize_row(
    typing_context: Any, inputs: Any, weight: Any, record: Any, num_groups: Any, epsilon: Any
) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        inputs, weight, record, num_groups, epsilon = values

        def quantize(group: ir.Value, normed: list[ir.Value]) -> None:
            emit_quantize(builder, normed, _at(builder, record, group, RECORD_BYTES))

        _emit_row(builder, inputs, weight, num_groups, epsilon, quantize)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, types.float32), codegen


@simd
def _rms_norm_add_row(typing_context: Any, inputs: Any, weight: Any, sums: Any, num_groups: Any, epsilon: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        inputs, weight, sums, num_groups, epsilon = values

        def add(group: ir.Value, normed: list[ir.Value]) -> None:
            start = _at(builder, sums, group, GROUP * 4)
            for part, (vector, before) in enumerate(zip(normed, emit_load_group(builder, start), strict=True)):
                place = builder.add(start, ir.Constant(INT64, 4 * WIDTH * part))
                emit_store(builder, builder.fadd(before, vector), place)

        _emit_row(builder, inputs, weight, num_groups, epsilon, add)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, types.float32), codegen


def _at(builder: ir.IRBuilder, base: ir.Value, group: ir.Value, num_bytes: int) -> ir.Value:
    return builder.add(base, builder.mul(group, ir.Constant(INT64, num_bytes)))


def _emit_row(
    builder: ir.IRBuilder,
    inputs: ir.Value,
    weight: ir.Value,
    num_groups: ir.Value,
    epsilon: ir.Value,
    emit_group: Callable[[ir.Value, list[ir.Value]], None],
) -> None:
    """`emit_group(group, normed)` takes the vectors of each group of 32."""

    zero = emit_constant(vector_type(WIDTH), 0.0)
    squares = [cgutils.alloca_once_value(builder, zero) for _ in range(GROUP // WIDTH)]
    with cgutils.for_range(builder, num_groups, intp=INT64) as loop:
        for memory, vector in zip(
            squares, emit_load_group(builder, _at(builder, inputs, loop.index, GROUP * 4)), strict=True
        ):
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
                emit_load_group(builder, _at(builder, inputs, loop.index, GROUP * 4)),
                emit_load_group(builder, _at(builder, weight, loop.index, GROUP * 4)),
                strict=True,
            )
        ]
        emit_group(loop.index, normed)


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


@kernel
def rms_norm_add_range(
    inputs: NDArray[np.float32],
    weight: NDArray[np.float32],
    epsilon: float,
    sums: NDArray[np.float32],
    first_row: int,
    last_row: int,
) -> None:
    """Rows [first_row, last_row) of `sums` float32 [m, k] += x / sqrt(mean(x**2) + epsilon) * weight.

    `inputs` float32 [m, k], `weight` float32 [k], contiguous; k is a multiple of 32. Nothing is checked here.
    """
    num_groups = inputs.shape[1] // GROUP
    row_bytes = inputs.shape[1] * 4
    for row in range(first_row, last_row):
        _rms_norm_add_row(
            inputs.ctypes.data + row * row_bytes,
            weight.ctypes.data,
            sums.ctypes.data + row * row_bytes,
            num_groups,
            np.float32(epsilon),
        )

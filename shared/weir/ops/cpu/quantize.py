"""Rows of activations become 8-bit integers with one scale for each group of 32, on CPUs. Each group is one record:

    scale = largest magnitude / 127        values = input * (127 / largest magnitude), rounded to nearest, ties to even

A group whose largest magnitude is below 1e-30 becomes zeros. One with an infinity or a NaN gets a scale of that kind,
so that every output of its row is infinite or NaN too, as it would be in float arithmetic.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from weir.ops.cpu.quantized_rows import (
    CORRECTION_OFFSET,
    GROUP,
    RECORD_BYTES,
    SCALE_OFFSET,
    SCALED_SUM_OFFSET,
    empty_rows,
)
from weir.ops.simd.float import INT32, INT64, emit_constant, emit_halves, emit_load, emit_store, vector_type
from weir.ops.simd.integer import emit_int_constant, int_vector
from weir.ops.simd.jit import kernel, simd

WIDTH = 16
_FEW = 4
_SMALLEST = 1e-30
# added to |x| < 2**22, this rounds x to an integer, ties to even, and leaves it in the low bits
_ROUND = 12582912.0


def emit_load_group(builder: ir.IRBuilder, address: ir.Value) -> list[ir.Value]:
    """32 floats at an address (i64), as vectors of 16."""
    return [
        emit_load(builder, builder.add(address, ir.Constant(INT64, 4 * first)), WIDTH)
        for first in range(0, GROUP, WIDTH)
    ]


def emit_quantize(builder: ir.IRBuilder, inputs: Sequence[ir.Value], record: ir.Value) -> None:
    """Writes the record at an address (i64)."""
    # all in vectors of which every lane is the same: general registers are several cycles away
    largest = _largest_magnitude(builder, inputs)
    is_zero = builder.fcmp_ordered("<", largest, emit_constant(largest.type, _SMALLEST))
    zero, top = emit_constant(largest.type, 0.0), emit_constant(largest.type, 127.0)
    scale = builder.select(is_zero, zero, builder.fdiv(largest, top))
    factor = _widened(builder, builder.select(is_zero, zero, builder.fdiv(top, largest)))
    total = None
    for part, vector in enumerate(inputs):
        rounded = builder.fadd(builder.fmul(vector, factor), emit_constant(vector.type, _ROUND))
        values = builder.trunc(builder.bitcast(rounded, int_vector(WIDTH)), int_vector(WIDTH, 8))
        address = builder.add(record, ir.Constant(INT64, WIDTH * part))
        builder.store(values, builder.inttoptr(address, values.type.as_pointer()), align=WIDTH)
        wide = builder.sext(values, int_vector(WIDTH))
        total = wide if total is None else builder.add(total, wide)
    group_sum = _combined(builder, total, builder.add)
    scaled_sum = builder.fmul(scale, builder.sitofp(group_sum, scale.type))
    _store_first(builder, scale, record, SCALE_OFFSET)
    _store_first(builder, scaled_sum, record, SCALED_SUM_OFFSET)
    correction = builder.mul(group_sum, emit_int_constant(group_sum.type, -128))
    _store_first(builder, correction, record, CORRECTION_OFFSET)


def _largest_magnitude(builder: ir.IRBuilder, inputs: Sequence[ir.Value]) -> ir.Value:
    """By the floats' bits, whose order as integers puts infinity above every number, and NaN above infinity."""

    def larger(a: ir.Value, b: ir.Value) -> ir.Value:
        return builder.select(builder.icmp_signed(">", a, b), a, b)

    lanes = int_vector(WIDTH)
    lower, upper = (
        builder.and_(builder.bitcast(vector, lanes), emit_int_constant(lanes, 0x7FFFFFFF)) for vector in inputs
    )
    return builder.bitcast(_combined(builder, larger(lower, upper), larger), vector_type(_FEW))


def _combined(builder: ir.IRBuilder, vector: ir.Value, combine: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    """All lanes combined, in each of 4 lanes."""
    while vector.type.count > _FEW:
        vector = combine(*emit_halves(builder, vector))
    for lanes in ([2, 3, 0, 1], [1, 0, 3, 2]):
        swapped = builder.shuffle_vector(vector, vector, ir.Constant(int_vector(_FEW), lanes))
        vector = combine(vector, swapped)
    return vector


def _widened(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    return builder.shuffle_vector(vector, vector, emit_int_constant(int_vector(WIDTH), 0))


def _store_first(builder: ir.IRBuilder, vector: ir.Value, record: ir.Value, offset: int) -> None:
    scalar = builder.extract_element(vector, INT32(0))
    emit_store(builder, scalar, builder.add(record, ir.Constant(INT64, offset)))


@simd
def _quantize_group(typing_context: Any, inputs: Any, record: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        emit_quantize(builder, emit_load_group(builder, values[0]), values[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@kernel
def quantize_range(inputs: NDArray[np.float32], rows: NDArray[np.uint8], first_group: int, last_group: int) -> None:
    """Quantizes groups [first_group, last_group) of 32, counted through all rows.

    `inputs` float32 [m, k], `rows` uint8 [m, row_bytes(k)], both contiguous; nothing is checked here.
    """
    num_groups = inputs.shape[1] // GROUP
    # a division a group would take as long as the group
    row, index = first_group // num_groups, first_group % num_groups
    for group in range(first_group, last_group):
        record = rows.ctypes.data + row * rows.shape[1] + index * RECORD_BYTES
        _quantize_group(inputs.ctypes.data + group * (GROUP * 4), record)
        index += 1
        if index == num_groups:
            row, index = row + 1, 0


def quantize_rows(inputs: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Quantized rows of `inputs` float32 [m, k]; `weir.ops.cpu.quantized_rows` describes them.

    Raises:
        ValueError: k is no multiple of 32.
    """
    inputs = np.ascontiguousarray(inputs, dtype=np.float32)
    rows = empty_rows(*inputs.shape)
    quantize_range(inputs, rows, 0, inputs.size // GROUP)
    return rows

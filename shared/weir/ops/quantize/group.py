"""One group of 32 floats becomes one record of a quantized row, as LLVM IR.

    scale = largest magnitude / 127        values = input * (127 / largest magnitude), rounded to nearest, ties to even

A group whose largest magnitude is below 1e-30 becomes zeros. One with an infinity or a NaN gets a scale of that kind,
so that every output of its row is infinite or NaN too, as it would be in float arithmetic.
"""

from collections.abc import Sequence

from llvmlite import ir

from weir.ops.quantize.rows import CORRECTION_OFFSET, GROUP, SCALE_OFFSET, SCALED_SUM_OFFSET
from weir.ops.simd.float import FLOAT, INT32, INT64, emit_constant, emit_horizontal, emit_load, emit_splat, emit_store
from weir.ops.simd.integer import emit_int_constant, int_vector

WIDTH = 16
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
    largest = _largest_magnitude(builder, inputs)
    is_zero = builder.fcmp_ordered("<", largest, ir.Constant(FLOAT, _SMALLEST))
    zero, top = ir.Constant(FLOAT, 0.0), ir.Constant(FLOAT, 127.0)
    scale = builder.select(is_zero, zero, builder.fdiv(largest, top))
    factor = emit_splat(builder, builder.select(is_zero, zero, builder.fdiv(top, largest)), WIDTH)
    total = None
    for part, vector in enumerate(inputs):
        rounded = builder.fadd(builder.fmul(vector, factor), emit_constant(vector.type, _ROUND))
        values = builder.trunc(builder.bitcast(rounded, int_vector(WIDTH)), int_vector(WIDTH, 8))
        address = builder.add(record, ir.Constant(INT64, WIDTH * part))
        builder.store(values, builder.inttoptr(address, values.type.as_pointer()), align=WIDTH)
        wide = builder.sext(values, int_vector(WIDTH))
        total = wide if total is None else builder.add(total, wide)
    group_sum = emit_horizontal(builder, total, builder.add)
    _store(builder, scale, record, SCALE_OFFSET)
    _store(builder, builder.fmul(scale, builder.sitofp(group_sum, FLOAT)), record, SCALED_SUM_OFFSET)
    _store(builder, builder.mul(group_sum, ir.Constant(INT32, -128)), record, CORRECTION_OFFSET)


def _largest_magnitude(builder: ir.IRBuilder, inputs: Sequence[ir.Value]) -> ir.Value:
    """By the floats' bits, whose order as integers puts infinity above every number, and NaN above infinity."""

    def larger(a: ir.Value, b: ir.Value) -> ir.Value:
        return builder.select(builder.icmp_signed(">", a, b), a, b)

    lanes = int_vector(WIDTH)
    bits = [builder.and_(builder.bitcast(vector, lanes), emit_int_constant(lanes, 0x7FFFFFFF)) for vector in inputs]
    combined = bits[0]
    for other in bits[1:]:
        combined = larger(combined, other)
    return builder.bitcast(emit_horizontal(builder, combined, larger), FLOAT)


def _store(builder: ir.IRBuilder, value: ir.Value, record: ir.Value, offset: int) -> None:
    emit_store(builder, value, builder.add(record, ir.Constant(INT64, offset)))

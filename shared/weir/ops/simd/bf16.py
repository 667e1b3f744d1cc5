"""bfloat16, the numbers of pages on CPUs: the upper half of a float32, kept as uint16.

Widening is exact and two integer instructions on any processor. Narrowing rounds to nearest, ties to even; what is no
number stays none.
"""

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from weir.ops.simd.float import FLOAT, INT32, emit_constant

BF16_BYTES = 2

_INT16 = ir.IntType(16)
_NOT_A_NUMBER = 0x7FC0


def emit_load_bf16(builder: ir.IRBuilder, address: ir.Value, width: int) -> ir.Value:
    """`width` of them at a byte address (i64) as `<width x float>`; needs no alignment beyond theirs."""
    pointer = builder.inttoptr(address, ir.VectorType(_INT16, width).as_pointer())
    integers = ir.VectorType(INT32, width)
    widened = builder.zext(builder.load(pointer, align=BF16_BYTES), integers)
    return builder.bitcast(builder.shl(widened, emit_constant(integers, 16)), ir.VectorType(FLOAT, width))


def emit_bf16(builder: ir.IRBuilder, values: ir.Value) -> ir.Value:
    """`<N x float>` as bfloat16, `<N x i16>`."""
    width = values.type.count
    wide, narrow = ir.VectorType(INT32, width), ir.VectorType(_INT16, width)
    bits = builder.bitcast(values, wide)
    is_odd = builder.and_(builder.lshr(bits, _every(wide, 16)), _every(wide, 1))
    to_even = builder.add(builder.add(bits, is_odd), _every(wide, 0x7FFF))
    rounded = builder.trunc(builder.lshr(to_even, _every(wide, 16)), narrow)
    return builder.select(builder.fcmp_unordered("uno", values, values), _every(narrow, _NOT_A_NUMBER), rounded)


def _every(kind: ir.VectorType, value: int) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


def bf16_from(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The same of an array, outside of kernels."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(_NOT_A_NUMBER), rounded)

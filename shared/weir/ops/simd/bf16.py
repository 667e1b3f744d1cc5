"""bfloat16, the numbers of pages on CPUs: the upper half of a float32, kept as uint16.

Widening is exact and two integer instructions on any processor. Narrowing rounds to nearest, ties to even; what is no
number stays none.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from weir.ops.simd.float import FLOAT, INT32, emit_constant
from weir.ops.simd.jit import simd

BF16_BYTES = 2

_INT16 = ir.IntType(16)
_NOT_A_NUMBER = 0x7FC0


def emit_load_bf16(builder: ir.IRBuilder, address: ir.Value, width: int) -> ir.Value:
    """`width` of them at a byte address (i64) as `<width x float>`; needs no alignment beyond theirs."""
    pointer = builder.inttoptr(address, ir.VectorType(_INT16, width).as_pointer())
    integers = ir.VectorType(INT32, width)
    widened = builder.zext(builder.load(pointer, align=BF16_BYTES), integers)
    return builder.bitcast(builder.shl(widened, emit_constant(integers, 16)), ir.VectorType(FLOAT, width))


@simd
def bf16_of(typing_context: Any, value: Any) -> Any:
    """One float32 as bfloat16 (uint16); LLVM makes vectors of a plain loop of them."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[ir.Value]) -> ir.Value:
        (value,) = args
        bits = builder.bitcast(value, INT32)
        upper = builder.lshr(bits, emit_constant(INT32, 16))
        is_odd = builder.and_(upper, emit_constant(INT32, 1))
        to_even = builder.add(builder.add(bits, is_odd), emit_constant(INT32, 0x7FFF))
        rounded = builder.trunc(builder.lshr(to_even, emit_constant(INT32, 16)), _INT16)
        return builder.select(
            builder.fcmp_unordered("uno", value, value), emit_constant(_INT16, _NOT_A_NUMBER), rounded
        )

    return types.uint16(types.float32), generate


def bf16_from(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The same of an array, outside of kernels."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(_NOT_A_NUMBER), rounded)

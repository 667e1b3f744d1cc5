"""Logits that stay below a bound, on CPUs (Bello et al.: "Neural combinatorial optimization", 2016)."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from weir.ops.simd.float import FLOAT_BYTES, emit_load, emit_splat, emit_store, emit_tanh
from weir.ops.simd.jit import kernel, simd
from weir.ops.simd.loops import Values, address_of, emit_offset, emit_slices

_SLICES = (16, 1)


@simd
def _cap_floats(typing_context: Any, values: Any, count: Any, factor: Any, cap: Any) -> Any:
    """Each x of `count` floats becomes cap * tanh(x * factor), in place."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Values) -> ir.Value:
        values, count, factor, cap = args

        def cap_slice(first: ir.Value, width: int) -> None:
            place = emit_offset(builder, values, first, FLOAT_BYTES)
            by, top = (emit_splat(builder, one, width) if width > 1 else one for one in (factor, cap))
            bent = emit_tanh(builder, builder.fmul(emit_load(builder, place, width), by))
            emit_store(builder, builder.fmul(bent, top), place)

        emit_slices(builder, count, _SLICES, cap_slice)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.float32), generate


@kernel
def cap_rows(logits: NDArray[np.float32], cap: np.float32) -> None:
    """Each x of `logits` [rows, vocabulary], contiguous, becomes cap * tanh(x / cap), in place. NaN stays NaN."""
    _cap_floats(address_of(logits), logits.size, np.float32(1.0) / cap, cap)

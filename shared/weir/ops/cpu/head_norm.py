"""Root mean square normalization of each head of queries and keys, on CPUs."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from weir.ops.head_dims import CPU_HEAD_DIM_STEP
from weir.ops.simd.float import (
    FLOAT,
    FLOAT_BYTES,
    emit_constant,
    emit_fma,
    emit_horizontal,
    emit_load,
    emit_splat,
    emit_store,
    vector_type,
)
from weir.ops.simd.jit import kernel, simd
from weir.ops.simd.loops import Values, address_of, emit_index, emit_loop, emit_offset

_WIDTH = CPU_HEAD_DIM_STEP


@simd
def _norm_head(typing_context: Any, head: Any, head_dim: Any, weight: Any, epsilon: Any) -> Any:
    """A head of `head_dim` floats in place; `weight` [head_dim]. Addresses, a count, a float."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Values) -> ir.Value:
        head, head_dim, weight, epsilon = args
        zero = emit_index(0)

        def add_squares(first: ir.Value, sums: Values) -> Values:
            vector = emit_load(builder, emit_offset(builder, head, first, FLOAT_BYTES), _WIDTH)
            return [emit_fma(builder, vector, vector, sums[0])]

        start = [emit_constant(vector_type(_WIDTH), 0.0)]
        squares = emit_loop(builder, zero, head_dim, _WIDTH, start, add_squares)[0]
        mean = builder.fdiv(emit_horizontal(builder, squares, builder.fadd), builder.sitofp(head_dim, FLOAT))
        square_root = builder.module.declare_intrinsic("llvm.sqrt", [FLOAT])
        root = builder.call(square_root, [builder.fadd(mean, epsilon)])
        factor = emit_splat(builder, builder.fdiv(ir.Constant(FLOAT, 1.0), root), _WIDTH)

        def scale(first: ir.Value, _: Values) -> Values:
            place = emit_offset(builder, head, first, FLOAT_BYTES)
            part = emit_load(builder, emit_offset(builder, weight, first, FLOAT_BYTES), _WIDTH)
            emit_store(builder, builder.fmul(builder.fmul(emit_load(builder, place, _WIDTH), factor), part), place)
            return []

        emit_loop(builder, zero, head_dim, _WIDTH, [], scale)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.float32), generate


@kernel
def norm_heads(
    qkv: NDArray[np.float32],
    weights: NDArray[np.float32],
    num_heads: int,
    num_kv_heads: int,
    epsilon: float,
    first_row: int,
    last_row: int,
) -> None:
    """Rows [first_row, last_row): each head x of queries and keys becomes x / sqrt(mean(x**2) + epsilon) * weight.

    Args:
        qkv: [tokens, (num_heads + 2 num_kv_heads) * head_dim]: queries, keys, values; in place.
        weights: [2, head_dim]: of queries, of keys.
        num_heads: Of queries.
        num_kv_heads: Of keys.
        epsilon: Added to the mean.
        first_row: The first token.
        last_row: The one behind the last.
    """
    head_dim = weights.shape[1]
    head_bytes, row_bytes = head_dim * FLOAT_BYTES, qkv.shape[1] * FLOAT_BYTES
    query_weight = address_of(weights)
    for row in range(first_row, last_row):
        heads = address_of(qkv) + row * row_bytes
        for head in range(num_heads + num_kv_heads):
            weight = query_weight if head < num_heads else query_weight + head_bytes
            _norm_head(heads + head * head_bytes, head_dim, weight, np.float32(epsilon))

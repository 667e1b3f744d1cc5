"""The inner loops of attention on CPUs as LLVM IR. Addresses are bytes (int64), strides too.

Keys and values are bfloat16, which is widened as it is read; all other data and all arithmetic is float32.

A tile is some query rows that meet the same keys and values. Every row's arithmetic is a chain of its own, in one order
whatever the number of rows: keys by dimension 0, 1, 2, …; values by token 0, 1, 2, …. That order, and not the tile,
decides the bits of a result.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from weir.kv.geometry import PAGE_TOKENS
from weir.ops.simd.bf16 import BF16_BYTES, emit_load_bf16
from weir.ops.simd.features import InstructionSet, instruction_set
from weir.ops.simd.float import (
    emit_constant,
    emit_fma,
    emit_load,
    emit_prefetch,
    emit_splat,
    emit_store,
    vector_type,
)
from weir.ops.simd.jit import simd
from weir.ops.simd.loops import Values, emit_index, emit_loop, emit_offset, emit_slices

TILE_ROWS = 6
"""Most rows of a tile."""

_FLOAT_BYTES = 4
_LINE_BYTES = 64
_KEY_STRIDE = PAGE_TOKENS * BF16_BYTES
_UNROLLED_DIMENSIONS = 8
# The second level takes more lines at once than the first: measured 15 against 11 GB/s a core on Zen 4.
_AHEAD_LEVEL = 2
_HAS_WIDE_REGISTERS = instruction_set() is InstructionSet.AVX512_VNNI
_VALUE_LANES = 16 if _HAS_WIDE_REGISTERS else 8
# Dimensions at a time: the sums of a tile, TILE_ROWS times as many, have to stay in registers.
_VALUE_SLICES = (64, 16, 8) if _HAS_WIDE_REGISTERS else (16, 8)


def _emit_rows_switch(builder: ir.IRBuilder, num_rows: ir.Value, emit: Callable[[int], None]) -> None:
    """`emit(n)` for the n in 1 … TILE_ROWS that `num_rows` is."""
    after = builder.append_basic_block("tiled")
    switch = builder.switch(num_rows, after)
    for rows in range(1, TILE_ROWS + 1):
        case = builder.append_basic_block(f"rows{rows}")
        switch.add_case(emit_index(rows), case)
        builder.position_at_end(case)
        emit(rows)
        builder.branch(after)
    builder.position_at_end(after)


def _emit_score_tile(builder: ir.IRBuilder, rows: int, args: Values) -> None:
    queries, query_stride, keys, ahead, head_dim, scores, score_stride = args
    query_rows = [emit_offset(builder, queries, emit_index(row), query_stride) for row in range(rows)]

    def dimensions(first: ir.Value, sums: Values) -> Values:
        for number in range(_UNROLLED_DIMENSIONS):
            dimension = builder.add(first, emit_index(number))
            if number * _KEY_STRIDE % _LINE_BYTES == 0:
                emit_prefetch(builder, emit_offset(builder, ahead, dimension, _KEY_STRIDE), _AHEAD_LEVEL)
            key = emit_load_bf16(builder, emit_offset(builder, keys, dimension, _KEY_STRIDE), PAGE_TOKENS)
            for row in range(rows):
                query = emit_load(builder, emit_offset(builder, query_rows[row], dimension, _FLOAT_BYTES), 1)
                sums[row] = emit_fma(builder, emit_splat(builder, query, PAGE_TOKENS), key, sums[row])
        return sums

    zeros = [emit_constant(vector_type(PAGE_TOKENS), 0.0)] * rows
    sums = emit_loop(builder, emit_index(0), head_dim, _UNROLLED_DIMENSIONS, zeros, dimensions)
    for row in range(rows):
        emit_store(builder, sums[row], emit_offset(builder, scores, emit_index(row), score_stride))


@simd
def score_tile(
    typing_context: Any,
    num_rows: Any,
    queries: Any,
    query_stride: Any,
    keys: Any,
    ahead: Any,
    head_dim: Any,
    scores: Any,
    score_stride: Any,
) -> Any:
    """Query rows times the keys of one page: `scores[row, 0:16] = Σ_d queries[row, d] keys[d, 0:16]`.

    `keys` is [head_dim, PAGE_TOKENS]; as much at `ahead` is fetched into the caches meanwhile.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Values) -> ir.Value:
        _emit_rows_switch(builder, args[0], lambda rows: _emit_score_tile(builder, rows, args[1:]))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), generate


def _emit_weigh_slice(builder: ir.IRBuilder, rows: int, first: ir.Value, num_dimensions: int, args: Values) -> None:
    weights, weight_stride, values, ahead, head_dim, num_tokens, sums, is_first = args
    lanes = min(num_dimensions, _VALUE_LANES)
    parts = range(0, num_dimensions, lanes)
    lines = range(0, num_dimensions * BF16_BYTES, _LINE_BYTES)
    values, ahead = (emit_offset(builder, base, first, BF16_BYTES) for base in (values, ahead))
    sums = emit_offset(builder, sums, first, _FLOAT_BYTES)
    value_stride, row_stride = (builder.mul(head_dim, emit_index(size)) for size in (BF16_BYTES, _FLOAT_BYTES))
    weight_rows = [emit_offset(builder, weights, emit_index(row), weight_stride) for row in range(rows)]
    sum_rows = [emit_offset(builder, sums, emit_index(row), row_stride) for row in range(rows)]
    places = [builder.add(sum_row, emit_index(part * _FLOAT_BYTES)) for sum_row in sum_rows for part in parts]

    def token_body(token: ir.Value, totals: Values) -> Values:
        for line in lines:
            place = builder.add(emit_offset(builder, ahead, token, value_stride), emit_index(line))
            emit_prefetch(builder, place, _AHEAD_LEVEL)
        start = emit_offset(builder, values, token, value_stride)
        starts = [builder.add(start, emit_index(part * BF16_BYTES)) for part in parts]
        loaded = [emit_load_bf16(builder, place, lanes) for place in starts]
        previous = iter(totals)
        results = []
        for row in range(rows):
            weight = emit_load(builder, emit_offset(builder, weight_rows[row], token, _FLOAT_BYTES), 1)
            splat = emit_splat(builder, weight, lanes)
            results += [emit_fma(builder, splat, value, next(previous)) for value in loaded]
        return results

    zero = emit_constant(vector_type(lanes), 0.0)
    starts_at_zero = builder.icmp_signed("!=", is_first, emit_index(0))
    initial = [builder.select(starts_at_zero, zero, emit_load(builder, place, lanes)) for place in places]
    totals = emit_loop(builder, emit_index(0), num_tokens, 1, initial, token_body)
    for total, place in zip(totals, places, strict=True):
        emit_store(builder, total, place)


@simd
def weigh_tile(
    typing_context: Any,
    num_rows: Any,
    weights: Any,
    weight_stride: Any,
    values: Any,
    ahead: Any,
    head_dim: Any,
    num_tokens: Any,
    sums: Any,
    is_first: Any,
) -> Any:
    """Adds the weighted values of one page: `sums[row, d] += Σ_t weights[row, t] values[t, d]`, t < `num_tokens`.

    `values` is [PAGE_TOKENS, head_dim]; as much at `ahead` is fetched into the caches meanwhile. Sums start at 0 where
    `is_first` is not 0, and are [rows, head_dim].
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Values) -> ir.Value:
        def emit(rows: int) -> None:
            def emit_slice(first: ir.Value, width: int) -> None:
                _emit_weigh_slice(builder, rows, first, width, args[1:])

            emit_slices(builder, args[5], _VALUE_SLICES, emit_slice)

        _emit_rows_switch(builder, args[0], emit)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), generate

"""The inner loops of attention on CPUs as LLVM IR. Addresses are bytes (int64), strides too; all data is float32.

A tile is some query rows that meet the same keys and values. Every row's arithmetic is a chain of its own, in one order
whatever the number of rows: keys by dimension 0, 1, 2, …; values by token 0, 1, 2, …. That order, and not the tile,
decides the bits of a result.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from weir.kv.geometry import PAGE_TOKENS
from weir.ops.simd.features import KernelTier, kernel_tier
from weir.ops.simd.float import (
    INT32,
    INT64,
    emit_constant,
    emit_exp2,
    emit_fma,
    emit_horizontal,
    emit_load,
    emit_max,
    emit_prefetch,
    emit_splat,
    emit_store,
    vector_type,
)
from weir.ops.simd.jit import simd

TILE_ROWS = 6
"""Most rows of a tile."""

_FLOAT_BYTES = 4
_LINE_BYTES = 64
_HAS_WIDE_REGISTERS = kernel_tier() is KernelTier.AVX512_VNNI
# the accumulators of a tile, TILE_ROWS times a slice of the head, have to stay in registers
_VALUE_LANES = 16 if _HAS_WIDE_REGISTERS else 8
_VALUE_SLICES = (64, 16, 8) if _HAS_WIDE_REGISTERS else (16, 8)

Values = list[ir.Value]


def _index(value: int) -> ir.Constant:
    return ir.Constant(INT64, value)


def _offset(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, stride: ir.Value | int) -> ir.Value:
    stride = _index(stride) if isinstance(stride, int) else stride
    return builder.add(base, builder.mul(index, stride))


def emit_loop(
    builder: ir.IRBuilder,
    first: ir.Value,
    last: ir.Value,
    step: int,
    initial: Values,
    body: Callable[[ir.Value, Values], Values],
) -> Values:
    """For index in range(first, last, step): values = body(index, values). Returns the last values."""
    before = builder.block
    head, inside, after = (builder.append_basic_block(name) for name in ("head", "inside", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(INT64)
    index.add_incoming(first, before)
    values = [builder.phi(value.type) for value in initial]
    for value, start in zip(values, initial, strict=True):
        value.add_incoming(start, before)
    builder.cbranch(builder.icmp_signed("<", index, last), inside, after)
    builder.position_at_end(inside)
    results = body(index, list(values))
    index.add_incoming(builder.add(index, _index(step)), builder.block)
    for value, result in zip(values, results, strict=True):
        value.add_incoming(result, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return values


def _emit_rows_switch(builder: ir.IRBuilder, num_rows: ir.Value, emit: Callable[[int], None]) -> None:
    """`emit(n)` for the n in 1 … TILE_ROWS that `num_rows` is."""
    after = builder.append_basic_block("tiled")
    switch = builder.switch(num_rows, after)
    for rows in range(1, TILE_ROWS + 1):
        case = builder.append_basic_block(f"rows{rows}")
        switch.add_case(_index(rows), case)
        builder.position_at_end(case)
        emit(rows)
        builder.branch(after)
    builder.position_at_end(after)


def _emit_score_tile(builder: ir.IRBuilder, rows: int, args: Values) -> None:
    queries, query_stride, keys, ahead, head_dim, scores, score_stride = args
    row_starts = [_offset(builder, queries, _index(row), query_stride) for row in range(rows)]
    unrolled = 8

    def dimensions(first: ir.Value, sums: Values) -> Values:
        for dimension in (builder.add(first, _index(number)) for number in range(unrolled)):
            emit_prefetch(builder, _offset(builder, ahead, dimension, PAGE_TOKENS * _FLOAT_BYTES))
            key = emit_load(builder, _offset(builder, keys, dimension, PAGE_TOKENS * _FLOAT_BYTES), PAGE_TOKENS)
            for row in range(rows):
                query = emit_load(builder, _offset(builder, row_starts[row], dimension, _FLOAT_BYTES), 1)
                sums[row] = emit_fma(builder, emit_splat(builder, query, PAGE_TOKENS), key, sums[row])
        return sums

    zeros = [emit_constant(vector_type(PAGE_TOKENS), 0.0)] * rows
    sums = emit_loop(builder, _index(0), head_dim, unrolled, zeros, dimensions)
    for row in range(rows):
        emit_store(builder, sums[row], _offset(builder, scores, _index(row), score_stride))


@simd
def address_of(typing_context: Any, array: Any) -> Any:
    """Where an array's data begins, in bytes."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Values) -> ir.Value:
        data = context.make_array(array)(context, builder, args[0]).data
        return builder.ptrtoint(data, INT64)

    return types.int64(array), generate


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


def _emit_weigh_slice(builder: ir.IRBuilder, rows: int, slice_dims: int, args: Values) -> None:
    weights, weight_stride, values, ahead, value_stride, num_tokens, sums, sum_stride = args
    lanes = min(slice_dims, _VALUE_LANES)
    parts = range(0, slice_dims * _FLOAT_BYTES, lanes * _FLOAT_BYTES)
    weight_rows = [_offset(builder, weights, _index(row), weight_stride) for row in range(rows)]
    places = [
        builder.add(_offset(builder, sums, _index(row), sum_stride), _index(part))
        for row in range(rows)
        for part in parts
    ]

    def tokens(token: ir.Value, totals: Values) -> Values:
        for line in range(0, slice_dims * _FLOAT_BYTES, _LINE_BYTES):
            emit_prefetch(builder, builder.add(_offset(builder, ahead, token, value_stride), _index(line)))
        start = _offset(builder, values, token, value_stride)
        loaded = [emit_load(builder, builder.add(start, _index(part)), lanes) for part in parts]
        previous = iter(totals)
        results = []
        for row in range(rows):
            weight = emit_load(builder, _offset(builder, weight_rows[row], token, _FLOAT_BYTES), 1)
            weight = emit_splat(builder, weight, lanes)
            results += [emit_fma(builder, weight, value, next(previous)) for value in loaded]
        return results

    initial = [emit_load(builder, place, lanes) for place in places]
    for total, place in zip(emit_loop(builder, _index(0), num_tokens, 1, initial, tokens), places, strict=True):
        emit_store(builder, total, place)


def _emit_weigh_tile(builder: ir.IRBuilder, rows: int, args: Values) -> None:
    weights, weight_stride, values, ahead, head_dim, num_tokens, sums, sum_stride = args
    value_stride = builder.mul(head_dim, _index(_FLOAT_BYTES))
    done = _index(0)
    for slice_dims in _VALUE_SLICES:
        # the largest multiple of slice_dims, a power of two, that fits
        last = builder.and_(head_dim, _index(-slice_dims))

        def slices(first: ir.Value, _: Values, slice_dims: int = slice_dims) -> Values:
            starts = [_offset(builder, base, first, _FLOAT_BYTES) for base in (values, ahead, sums)]
            _emit_weigh_slice(
                builder,
                rows,
                slice_dims,
                [weights, weight_stride, starts[0], starts[1], value_stride, num_tokens, starts[2], sum_stride],
            )
            return []

        emit_loop(builder, done, last, slice_dims, [], slices)
        done = last


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
    sum_stride: Any,
) -> Any:
    """Adds the weighted values of one page: `sums[row, d] += Σ_t weights[row, t] values[t, d]`, t < `num_tokens`.

    `values` is [PAGE_TOKENS, head_dim]; as much at `ahead` is fetched into the caches meanwhile.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Values) -> ir.Value:
        _emit_rows_switch(builder, args[0], lambda rows: _emit_weigh_tile(builder, rows, args[1:]))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), generate


@simd
def soften_row(typing_context: Any, scores: Any, num_tokens: Any, num_padded: Any, scale: Any, stats: Any) -> Any:
    """Scores of one row become weights, in place: `2**((score - largest) scale)`, 0 from `num_tokens` to `num_padded`.

    `num_tokens` is at least 1, `num_padded` a multiple of 16. The largest score and the sum of the weights (16 partial
    sums by lane, then halves) go to `stats[0:2]`.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Values) -> ir.Value:
        address, num_valid, num_lanes, factor, results = args
        lanes = 16
        vector = vector_type(lanes)
        lane_numbers = ir.Constant(ir.VectorType(INT32, lanes), [ir.Constant(INT32, lane) for lane in range(lanes)])
        nothing = emit_constant(vector, float("-inf"))

        def masked(first: ir.Value) -> ir.Value:
            left = emit_splat(builder, builder.trunc(builder.sub(num_valid, first), INT32), lanes)
            loaded = emit_load(builder, _offset(builder, address, first, _FLOAT_BYTES), lanes)
            return builder.select(builder.icmp_signed("<", lane_numbers, left), loaded, nothing)

        def largest(first: ir.Value, values: Values) -> Values:
            return [emit_max(builder, values[0], masked(first))]

        (maxima,) = emit_loop(builder, _index(0), num_lanes, lanes, [nothing], largest)
        maximum = emit_horizontal(builder, maxima, lambda a, b: emit_max(builder, a, b))
        maxima, factors = emit_splat(builder, maximum, lanes), emit_splat(builder, factor, lanes)

        def weigh(first: ir.Value, values: Values) -> Values:
            weights = emit_exp2(builder, builder.fmul(builder.fsub(masked(first), maxima), factors))
            emit_store(builder, weights, _offset(builder, address, first, _FLOAT_BYTES))
            return [builder.fadd(values[0], weights)]

        (sums,) = emit_loop(builder, _index(0), num_lanes, lanes, [emit_constant(vector, 0.0)], weigh)
        emit_store(builder, maximum, results)
        emit_store(builder, emit_horizontal(builder, sums, builder.fadd), builder.add(results, _index(_FLOAT_BYTES)))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.float32, types.int64), generate

"""The inner loops of attention on CPUs as LLVM IR. Addresses are bytes (int64), strides too.

Keys and values are bfloat16, which is widened as it is read; all other data and all arithmetic is float32.

A tile is some query rows that meet the same keys and values. Every row's arithmetic is a chain of its own, in one order
whatever the number of rows: keys by dimension 0, 1, 2, …; values by token 0, 1, 2, …. That order, and not the tile,
decides the bits of a result. A row's stats are two floats: its largest score, and the sum of its weights relative to
that.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from weir.kv.geometry import PAGE_TOKENS
from weir.ops.head_dims import CPU_HEAD_DIM_STEP
from weir.ops.simd.bf16 import BF16_BYTES, emit_load_bf16
from weir.ops.simd.features import InstructionSet, instruction_set
from weir.ops.simd.float import (
    FLOAT,
    FLOAT_BYTES,
    INT32,
    emit_constant,
    emit_exp2,
    emit_fma,
    emit_horizontal,
    emit_load,
    emit_max,
    emit_prefetch,
    emit_splat,
    emit_store,
    emit_tanh,
    vector_type,
)
from weir.ops.simd.jit import simd
from weir.ops.simd.loops import Values, emit_index, emit_loop, emit_offset, emit_slices

TILE_ROWS = 6
"""Most rows of a tile."""
_LINE_BYTES = 64
_KEY_STRIDE = PAGE_TOKENS * BF16_BYTES
_UNROLLED_DIMENSIONS = CPU_HEAD_DIM_STEP
# The second level takes more lines at once than the first: measured 15 against 11 GB/s a core on Zen 4.
_AHEAD_LEVEL = 2
_HAS_WIDE_REGISTERS = instruction_set().vectors is InstructionSet.AVX512_VNNI
SCORED_PAGES = 2 if _HAS_WIDE_REGISTERS else 1
"""At once: with 16 registers the sums of a tile leave no room for another page's."""
_VALUE_LANES = 16 if _HAS_WIDE_REGISTERS else 8
# Dimensions at a time: the sums of a tile, TILE_ROWS times as many, have to stay in registers.
_VALUE_SLICES = (64, 16, CPU_HEAD_DIM_STEP) if _HAS_WIDE_REGISTERS else (16, CPU_HEAD_DIM_STEP)
_LANES = 16
_SLICES = (16, CPU_HEAD_DIM_STEP)


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


def _emit_score_tile(builder: ir.IRBuilder, rows: int, pages: Values, aheads: Values, args: Values) -> None:
    """`pages` and `aheads`: keys of neighbouring pages, and what is fetched while each of them is read."""
    queries, query_stride, head_dim, scores, score_stride = args
    query_rows = [emit_offset(builder, queries, emit_index(row), query_stride) for row in range(rows)]

    def dimensions(first: ir.Value, sums: Values) -> Values:
        for number in range(_UNROLLED_DIMENSIONS):
            dimension = builder.add(first, emit_index(number))
            if number * _KEY_STRIDE % _LINE_BYTES == 0:
                for ahead in aheads:
                    emit_prefetch(builder, emit_offset(builder, ahead, dimension, _KEY_STRIDE), _AHEAD_LEVEL)
            places = [emit_offset(builder, page, dimension, _KEY_STRIDE) for page in pages]
            keys = [emit_load_bf16(builder, place, PAGE_TOKENS) for place in places]
            previous = iter(sums)
            sums = []
            for row in range(rows):
                query = emit_load(builder, emit_offset(builder, query_rows[row], dimension, FLOAT_BYTES), 1)
                splat = emit_splat(builder, query, PAGE_TOKENS)
                sums += [emit_fma(builder, splat, key, next(previous)) for key in keys]
        return sums

    zeros = [emit_constant(vector_type(PAGE_TOKENS), 0.0)] * (rows * len(pages))
    sums = iter(emit_loop(builder, emit_index(0), head_dim, _UNROLLED_DIMENSIONS, zeros, dimensions))
    for row in range(rows):
        place = emit_offset(builder, scores, emit_index(row), score_stride)
        for page in range(len(pages)):
            emit_store(builder, next(sums), builder.add(place, emit_index(page * PAGE_TOKENS * FLOAT_BYTES)))


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
        num_rows, queries, query_stride, keys, ahead, *rest = args
        rest = [queries, query_stride, *rest]
        _emit_rows_switch(builder, num_rows, lambda rows: _emit_score_tile(builder, rows, [keys], [ahead], rest))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), generate


@simd
def score_pair(
    typing_context: Any,
    num_rows: Any,
    queries: Any,
    query_stride: Any,
    keys: Any,
    ahead: Any,
    next_keys: Any,
    next_ahead: Any,
    head_dim: Any,
    scores: Any,
    score_stride: Any,
) -> Any:
    """As `score_tile` of two pages, whose scores stand side by side: what is loaded of a query serves twice, and there
    are twice as many sums that do not wait for one another."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Values) -> ir.Value:
        num_rows, queries, query_stride, keys, ahead, next_keys, next_ahead, *rest = args
        pages, aheads, rest = [keys, next_keys], [ahead, next_ahead], [queries, query_stride, *rest]
        _emit_rows_switch(builder, num_rows, lambda rows: _emit_score_tile(builder, rows, pages, aheads, rest))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10), generate


def _emit_weigh_slice(builder: ir.IRBuilder, rows: int, first: ir.Value, num_dimensions: int, args: Values) -> None:
    weights, weight_stride, values, ahead, head_dim, num_tokens, sums, is_first = args
    lanes = min(num_dimensions, _VALUE_LANES)
    parts = range(0, num_dimensions, lanes)
    lines = range(0, num_dimensions * BF16_BYTES, _LINE_BYTES)
    values, ahead = (emit_offset(builder, base, first, BF16_BYTES) for base in (values, ahead))
    sums = emit_offset(builder, sums, first, FLOAT_BYTES)
    value_stride, row_stride = (builder.mul(head_dim, emit_index(size)) for size in (BF16_BYTES, FLOAT_BYTES))
    weight_rows = [emit_offset(builder, weights, emit_index(row), weight_stride) for row in range(rows)]
    sum_rows = [emit_offset(builder, sums, emit_index(row), row_stride) for row in range(rows)]
    places = [builder.add(sum_row, emit_index(part * FLOAT_BYTES)) for sum_row in sum_rows for part in parts]

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
            weight = emit_load(builder, emit_offset(builder, weight_rows[row], token, FLOAT_BYTES), 1)
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


def _emit_masked_scores(
    builder: ir.IRBuilder, scores: ir.Value, first: ir.Value, first_token: ir.Value, num_tokens: ir.Value
) -> ir.Value:
    """16 scores from `first` on; minus infinity before `first_token` and from `num_tokens` on, whatever is there."""
    lanes = ir.Constant(ir.VectorType(INT32, _LANES), [ir.Constant(INT32, lane) for lane in range(_LANES)])
    passed, left = (
        emit_splat(builder, builder.trunc(builder.sub(bound, first), INT32), _LANES)
        for bound in (first_token, num_tokens)
    )
    loaded = emit_load(builder, emit_offset(builder, scores, first, FLOAT_BYTES), _LANES)
    nothing = emit_constant(vector_type(_LANES), float("-inf"))
    is_seen = builder.and_(builder.icmp_signed(">=", lanes, passed), builder.icmp_signed("<", lanes, left))
    return builder.select(is_seen, loaded, nothing)


@simd
def soften_row(
    typing_context: Any, scores: Any, first_token: Any, num_tokens: Any, num_padded: Any, scale: Any, stats: Any
) -> Any:
    """Scores of one row become weights, in place: `2**((score - largest) scale)`, 0 before `first_token` and from
    `num_tokens` to `num_padded`.

    `num_tokens` is more than `first_token`, `num_padded` a multiple of 16. The row's stats go to `stats`; weights are
    added up lane by lane, then the lanes by halves.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Values) -> ir.Value:
        scores, first_token, num_tokens, num_padded, scale, stats = args
        zeros = emit_constant(vector_type(_LANES), 0.0)

        def find_largest(first: ir.Value, values: Values) -> Values:
            return [emit_max(builder, values[0], _emit_masked_scores(builder, scores, first, first_token, num_tokens))]

        nothing = emit_constant(vector_type(_LANES), float("-inf"))
        (maxima,) = emit_loop(builder, emit_index(0), num_padded, _LANES, [nothing], find_largest)
        largest = emit_horizontal(builder, maxima, lambda a, b: emit_max(builder, a, b))
        largest_splat, scale_splat = emit_splat(builder, largest, _LANES), emit_splat(builder, scale, _LANES)

        def weigh(first: ir.Value, values: Values) -> Values:
            seen = _emit_masked_scores(builder, scores, first, first_token, num_tokens)
            distance = builder.fsub(seen, largest_splat)
            weights = emit_exp2(builder, builder.fmul(distance, scale_splat))
            emit_store(builder, weights, emit_offset(builder, scores, first, FLOAT_BYTES))
            return [builder.fadd(values[0], weights)]

        (sums,) = emit_loop(builder, emit_index(0), num_padded, _LANES, [zeros], weigh)
        emit_store(builder, largest, stats)
        emit_store(builder, emit_horizontal(builder, sums, builder.fadd), builder.add(stats, emit_index(FLOAT_BYTES)))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, types.float32, types.int64), generate


@simd
def cap_row(typing_context: Any, scores: Any, num_padded: Any, factor: Any) -> Any:
    """Each score s of one row becomes tanh(s * factor), in place. `num_padded` is a multiple of 16."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Values) -> ir.Value:
        scores, num_padded, factor = args
        splat = emit_splat(builder, factor, _LANES)

        def cap(first: ir.Value, _: Values) -> Values:
            place = emit_offset(builder, scores, first, FLOAT_BYTES)
            emit_store(builder, emit_tanh(builder, builder.fmul(emit_load(builder, place, _LANES), splat)), place)
            return []

        emit_loop(builder, emit_index(0), num_padded, _LANES, [], cap)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), generate


@simd
def merge_row(
    typing_context: Any, sums: Any, stats: Any, block_sums: Any, block_stats: Any, head_dim: Any, scale: Any
) -> Any:
    """Adds a later block's weighted values and stats to those of the blocks before it, in place."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Values) -> ir.Value:
        sums, stats, block_sums, block_stats, head_dim, scale = args
        second = emit_index(FLOAT_BYTES)
        before, added = emit_load(builder, stats, 1), emit_load(builder, block_stats, 1)
        largest = emit_max(builder, before, added)
        # both factors at once: an exponential of two lanes costs as much as one
        pair = ir.Constant(ir.VectorType(FLOAT, 2), ir.Undefined)
        for lane, score in enumerate((before, added)):
            exponent = builder.fmul(builder.fsub(score, largest), scale)
            pair = builder.insert_element(pair, exponent, ir.Constant(INT32, lane))
        factors = emit_exp2(builder, pair)
        factor, block_factor = (builder.extract_element(factors, ir.Constant(INT32, lane)) for lane in range(2))

        def combine(old: ir.Value, new: ir.Value, width: int) -> None:
            kept, fresh = (emit_load(builder, place, width) for place in (old, new))
            splats = [emit_splat(builder, one, width) if width > 1 else one for one in (factor, block_factor)]
            total = emit_fma(builder, kept, splats[0], builder.fmul(fresh, splats[1]))
            emit_store(builder, total, old)

        def combine_slice(first: ir.Value, width: int) -> None:
            old = emit_offset(builder, sums, first, FLOAT_BYTES)
            combine(old, emit_offset(builder, block_sums, first, FLOAT_BYTES), width)

        emit_store(builder, largest, stats)
        combine(builder.add(stats, second), builder.add(block_stats, second), 1)
        emit_slices(builder, head_dim, _SLICES, combine_slice)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5, types.float32), generate


@simd
def finish_row(typing_context: Any, sums: Any, stats: Any, head_dim: Any, attended: Any) -> Any:
    """Writes the weighted mean of a row's values to `attended` [head_dim]."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Values) -> ir.Value:
        sums, stats, head_dim, attended = args
        total = emit_load(builder, builder.add(stats, emit_index(FLOAT_BYTES)), 1)
        inverse = builder.fdiv(emit_constant(FLOAT, 1.0), total)

        def finish_slice(first: ir.Value, width: int) -> None:
            loaded = emit_load(builder, emit_offset(builder, sums, first, FLOAT_BYTES), width)
            mean = builder.fmul(loaded, emit_splat(builder, inverse, width))
            emit_store(builder, mean, emit_offset(builder, attended, first, FLOAT_BYTES))

        emit_slices(builder, head_dim, _SLICES, finish_slice)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@simd
def copy_floats(typing_context: Any, source: Any, count: Any, target: Any) -> Any:
    """`count` floats, a multiple of 8."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Values) -> ir.Value:
        source, count, target = args

        def copy_slice(first: ir.Value, width: int) -> None:
            loaded = emit_load(builder, emit_offset(builder, source, first, FLOAT_BYTES), width)
            emit_store(builder, loaded, emit_offset(builder, target, first, FLOAT_BYTES))

        emit_slices(builder, count, _SLICES, copy_slice)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate

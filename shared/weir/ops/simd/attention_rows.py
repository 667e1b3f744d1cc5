"""What attention does with one query row at a time, as LLVM IR. Addresses are bytes (int64); all data is float32.

A row's stats are two floats: its largest score, and the sum of its weights relative to that.
"""

from typing import Any

from llvmlite import ir
from numba import types

from weir.ops.simd.float import (
    FLOAT,
    INT32,
    emit_constant,
    emit_exp2,
    emit_fma,
    emit_horizontal,
    emit_load,
    emit_max,
    emit_splat,
    emit_store,
    vector_type,
)
from weir.ops.simd.jit import simd
from weir.ops.simd.loops import Values, emit_index, emit_loop, emit_offset, emit_slices

_FLOAT_BYTES = 4
_LANES = 16
_SLICES = (16, 8)


def _emit_masked_scores(builder: ir.IRBuilder, scores: ir.Value, first: ir.Value, num_tokens: ir.Value) -> ir.Value:
    """16 scores from `first` on; minus infinity from `num_tokens` on, whatever is there."""
    lanes = ir.Constant(ir.VectorType(INT32, _LANES), [ir.Constant(INT32, lane) for lane in range(_LANES)])
    left = emit_splat(builder, builder.trunc(builder.sub(num_tokens, first), INT32), _LANES)
    loaded = emit_load(builder, emit_offset(builder, scores, first, _FLOAT_BYTES), _LANES)
    nothing = emit_constant(vector_type(_LANES), float("-inf"))
    return builder.select(builder.icmp_signed("<", lanes, left), loaded, nothing)


@simd
def soften_row(typing_context: Any, scores: Any, num_tokens: Any, num_padded: Any, scale: Any, stats: Any) -> Any:
    """Scores of one row become weights, in place: `2**((score - largest) scale)`, 0 from `num_tokens` to `num_padded`.

    `num_tokens` is at least 1, `num_padded` a multiple of 16. The row's stats go to `stats`; weights are added up lane
    by lane, then the lanes by halves.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Values) -> ir.Value:
        scores, num_tokens, num_padded, scale, stats = args
        zeros = emit_constant(vector_type(_LANES), 0.0)

        def find_largest(first: ir.Value, values: Values) -> Values:
            return [emit_max(builder, values[0], _emit_masked_scores(builder, scores, first, num_tokens))]

        nothing = emit_constant(vector_type(_LANES), float("-inf"))
        (maxima,) = emit_loop(builder, emit_index(0), num_padded, _LANES, [nothing], find_largest)
        largest = emit_horizontal(builder, maxima, lambda a, b: emit_max(builder, a, b))
        largest_splat, scale_splat = emit_splat(builder, largest, _LANES), emit_splat(builder, scale, _LANES)

        def weigh(first: ir.Value, values: Values) -> Values:
            distance = builder.fsub(_emit_masked_scores(builder, scores, first, num_tokens), largest_splat)
            weights = emit_exp2(builder, builder.fmul(distance, scale_splat))
            emit_store(builder, weights, emit_offset(builder, scores, first, _FLOAT_BYTES))
            return [builder.fadd(values[0], weights)]

        (sums,) = emit_loop(builder, emit_index(0), num_padded, _LANES, [zeros], weigh)
        emit_store(builder, largest, stats)
        emit_store(builder, emit_horizontal(builder, sums, builder.fadd), builder.add(stats, emit_index(_FLOAT_BYTES)))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.float32, types.int64), generate


@simd
def merge_row(
    typing_context: Any, sums: Any, stats: Any, block_sums: Any, block_stats: Any, head_dim: Any, scale: Any
) -> Any:
    """Adds a later block's weighted values and stats to those of the blocks before it, in place."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Values) -> ir.Value:
        sums, stats, block_sums, block_stats, head_dim, scale = args
        second = emit_index(_FLOAT_BYTES)
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
            old = emit_offset(builder, sums, first, _FLOAT_BYTES)
            combine(old, emit_offset(builder, block_sums, first, _FLOAT_BYTES), width)

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
        total = emit_load(builder, builder.add(stats, emit_index(_FLOAT_BYTES)), 1)
        inverse = builder.fdiv(emit_constant(FLOAT, 1.0), total)

        def finish_slice(first: ir.Value, width: int) -> None:
            loaded = emit_load(builder, emit_offset(builder, sums, first, _FLOAT_BYTES), width)
            mean = builder.fmul(loaded, emit_splat(builder, inverse, width))
            emit_store(builder, mean, emit_offset(builder, attended, first, _FLOAT_BYTES))

        emit_slices(builder, head_dim, _SLICES, finish_slice)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@simd
def copy_floats(typing_context: Any, source: Any, count: Any, target: Any) -> Any:
    """`count` floats, a multiple of 8."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Values) -> ir.Value:
        source, count, target = args

        def copy_slice(first: ir.Value, width: int) -> None:
            loaded = emit_load(builder, emit_offset(builder, source, first, _FLOAT_BYTES), width)
            emit_store(builder, loaded, emit_offset(builder, target, first, _FLOAT_BYTES))

        emit_slices(builder, count, _SLICES, copy_slice)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate

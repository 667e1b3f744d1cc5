"""Addresses and counted loops as LLVM IR. Addresses and counts are i64."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from weir.ops.simd.float import INT64, emit_prefetch
from weir.ops.simd.jit import simd

Values = list[ir.Value]


def emit_index(value: int) -> ir.Constant:
    """A constant."""
    return ir.Constant(INT64, value)


def emit_offset(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, stride: ir.Value | int) -> ir.Value:
    """base + index * stride."""
    stride = emit_index(stride) if isinstance(stride, int) else stride
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
    index.add_incoming(builder.add(index, emit_index(step)), builder.block)
    for value, result in zip(values, results, strict=True):
        value.add_incoming(result, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return values


def emit_slices(
    builder: ir.IRBuilder, count: ir.Value, widths: tuple[int, ...], body: Callable[[ir.Value, int], None]
) -> None:
    """`body(first, width)` for slices that cover 0 … count - 1, the widest first.

    `widths` are powers of two, falling; `count` is a multiple of the last.
    """
    done = emit_index(0)
    for width in widths:
        last = builder.and_(count, emit_index(-width))

        def slice_body(first: ir.Value, _: Values, width: int = width) -> Values:
            body(first, width)
            return []

        emit_loop(builder, done, last, width, [], slice_body)
        done = last


@simd
def address_of(typing_context: Any, array: Any) -> Any:
    """Where an array's data begins, in bytes."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Values) -> ir.Value:
        data = context.make_array(array)(context, builder, args[0]).data
        return builder.ptrtoint(data, INT64)

    return types.int64(array), generate


@simd
def prefetch(typing_context: Any, address: Any) -> Any:
    """Asks for the cache line at a byte address, which need not be readable, in the cache of the second level."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Values) -> ir.Value:
        emit_prefetch(builder, args[0], cache_level=2)
        return context.get_dummy_value()

    return types.void(types.int64), generate

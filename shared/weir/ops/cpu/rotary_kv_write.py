"""Rotary embedding and the write of keys and values on a CPU."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from weir.kv.geometry import PAGE_TOKENS
from weir.ops.head_dims import CPU_HEAD_DIM_STEP
from weir.ops.simd.bf16 import BF16_BYTES, emit_bf16
from weir.ops.simd.float import FLOAT_BYTES, INT32, emit_load, emit_store
from weir.ops.simd.jit import kernel, simd
from weir.ops.simd.loops import Values, address_of, emit_index, emit_offset, emit_slices

_SLICES = (16, CPU_HEAD_DIM_STEP, CPU_HEAD_DIM_STEP // 2)


@simd
def rotate_head(typing_context: Any, head: Any, half: Any, cosines: Any, sines: Any) -> Any:
    """Rotates the pairs (i, i + half) of a head of 2 * half floats, in place; `cosines`, `sines` [half]. All addresses.

    Products and sums are rounded one by one: the same bits as the eager operations of the fp32 path.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Values) -> ir.Value:
        head, half, cosines, sines = args

        def rotate(first: ir.Value, width: int) -> None:
            places = [emit_offset(builder, head, first, FLOAT_BYTES)]
            places.append(emit_offset(builder, places[0], half, FLOAT_BYTES))
            low, high = (emit_load(builder, place, width) for place in places)
            cosine, sine = (
                emit_load(builder, emit_offset(builder, table, first, FLOAT_BYTES), width) for table in (cosines, sines)
            )
            turned = builder.fsub(builder.fmul(low, cosine), builder.fmul(high, sine))
            emit_store(builder, turned, places[0])
            emit_store(builder, builder.fadd(builder.fmul(high, cosine), builder.fmul(low, sine)), places[1])

        emit_slices(builder, half, _SLICES, rotate)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@simd
def write_value(typing_context: Any, head: Any, head_dim: Any, target: Any) -> Any:
    """A head's floats as bfloat16, one behind the other."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Values) -> ir.Value:
        head, head_dim, target = args

        def write(first: ir.Value, width: int) -> None:
            numbers = emit_bf16(builder, emit_load(builder, emit_offset(builder, head, first, FLOAT_BYTES), width))
            place = emit_offset(builder, target, first, BF16_BYTES)
            builder.store(numbers, builder.inttoptr(place, numbers.type.as_pointer()), align=BF16_BYTES)

        emit_slices(builder, head_dim, _SLICES[:2], write)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


@simd
def write_key(typing_context: Any, head: Any, head_dim: Any, target: Any) -> Any:
    """A head's floats as bfloat16, each at its token's place in the dimension's row of a page."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Values) -> ir.Value:
        head, head_dim, target = args

        def write(first: ir.Value, width: int) -> None:
            numbers = emit_bf16(builder, emit_load(builder, emit_offset(builder, head, first, FLOAT_BYTES), width))
            start = emit_offset(builder, target, first, PAGE_TOKENS * BF16_BYTES)
            for lane in range(width):
                place = builder.add(start, emit_index(lane * PAGE_TOKENS * BF16_BYTES))
                pointer = builder.inttoptr(place, numbers.type.element.as_pointer())
                builder.store(builder.extract_element(numbers, INT32(lane)), pointer, align=BF16_BYTES)

        emit_slices(builder, head_dim, _SLICES[:2], write)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


@kernel
def rotary_kv_write(
    qkv: NDArray[np.float32],
    positions: NDArray[np.int32],
    page_ids: NDArray[np.int32],
    cosines: NDArray[np.float32],
    sines: NDArray[np.float32],
    pages: NDArray[np.uint16],
    layer: int,
    thread: int,
    num_threads: int,
) -> None:
    """This thread's share of a step's tokens: rotates queries and keys, writes keys and values into their pages.

    Args:
        qkv: [tokens, (num_heads + 2 num_kv_heads) * head_dim]: queries, keys, values; queries and keys are rotated in
            place.
        positions: [tokens]: where each token stands in its sequence.
        page_ids: [tokens]: the page that holds that position.
        cosines: [max_context_tokens, head_dim / 2].
        sines: The same shape.
        pages: [num_pages, num_layers, 2, num_kv_heads, PAGE_TOKENS * head_dim] bfloat16, see `weir.kv.geometry`.
        layer: Which layer's pages.
        thread: In 0 … num_threads - 1.
        num_threads: Among how many threads the tokens are shared.
    """
    num_tokens, row_floats = qkv.shape
    num_kv_heads = pages.shape[3]
    head_dim = pages.shape[4] // PAGE_TOKENS
    num_heads = row_floats // head_dim - 2 * num_kv_heads
    half_bytes, head_bytes = head_dim // 2 * FLOAT_BYTES, head_dim * FLOAT_BYTES
    _, num_layers, _, _, block_numbers = pages.shape
    block_bytes = block_numbers * BF16_BYTES
    cosines_at, sines_at = address_of(cosines), address_of(sines)
    for token in range(num_tokens * thread // num_threads, num_tokens * (thread + 1) // num_threads):
        row = address_of(qkv) + token * row_floats * FLOAT_BYTES
        angles, place = positions[token] * half_bytes, positions[token] % PAGE_TOKENS
        for head in range(num_heads + num_kv_heads):
            rotate_head(row + head * head_bytes, head_dim // 2, cosines_at + angles, sines_at + angles)
        page = address_of(pages) + (page_ids[token] * num_layers + layer) * 2 * num_kv_heads * block_bytes
        for kv_head in range(num_kv_heads):
            key = row + (num_heads + kv_head) * head_bytes
            value = key + num_kv_heads * head_bytes
            keys, values = page + kv_head * block_bytes, page + (num_kv_heads + kv_head) * block_bytes
            write_key(key, head_dim, keys + place * BF16_BYTES)
            write_value(value, head_dim, values + place * head_dim * BF16_BYTES)

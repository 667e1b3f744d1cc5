"""Rotary embedding and the write of keys and values on a CPU."""

import numpy as np
from numpy.typing import NDArray

from weir.kv.geometry import PAGE_TOKENS
from weir.ops.simd.bf16 import bf16_of
from weir.ops.simd.jit import kernel


@kernel
def rotate_head(head: NDArray[np.float32], cosines: NDArray[np.float32], sines: NDArray[np.float32]) -> None:
    """Rotates the pairs (i, i + head_dim / 2) of `head` [head_dim], in place; `cosines`, `sines` [head_dim / 2].

    Products and sums are rounded one by one: the same bits as the eager operations of the fp32 path.
    """
    half = cosines.size
    for index in range(half):
        low, high = head[index], head[index + half]
        head[index] = low * cosines[index] - high * sines[index]
        head[index + half] = high * cosines[index] + low * sines[index]


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
    for token in range(num_tokens * thread // num_threads, num_tokens * (thread + 1) // num_threads):
        position, place = positions[token], positions[token] % PAGE_TOKENS
        for head in range(num_heads + num_kv_heads):
            rotate_head(qkv[token, head * head_dim : (head + 1) * head_dim], cosines[position], sines[position])
        page = pages[page_ids[token], layer]
        for kv_head in range(num_kv_heads):
            first_key = (num_heads + kv_head) * head_dim
            first_value = first_key + num_kv_heads * head_dim
            for dimension in range(head_dim):
                page[0, kv_head, dimension * PAGE_TOKENS + place] = bf16_of(qkv[token, first_key + dimension])
            for dimension in range(head_dim):
                page[1, kv_head, place * head_dim + dimension] = bf16_of(qkv[token, first_value + dimension])

"""Prefill attention on a CPU, over pages in place.

One work item is a chunk, a key head and some query tokens; the query heads of that key head make `group_heads` rows of
each token, so that every key and value read serves up to ITEM_ROWS rows. A row's operations are those of decode, in the
same order: it has the same bits whether its token came alone or in a chunk of any size.
"""

import numpy as np
from numba import prange
from numpy.typing import NDArray

from weir.kv.geometry import PAGE_TOKENS
from weir.ops.paged_attention.cpu import (
    BLOCK_PAGES,
    BLOCK_TOKENS,
    head_pages,
    merge_row,
    score_block,
    soften_block,
    softmax_scale,
    weigh_block,
)
from weir.ops.simd.attention import address_of
from weir.ops.simd.jit import kernel, parallel_kernel

ITEM_ROWS = 48

_FLOAT_BYTES = 4


@kernel
def item_tokens(group_heads: int) -> int:
    """Query tokens of one work item."""
    return max(1, ITEM_ROWS // group_heads)


@kernel
def num_prefill_items(chunk_tokens: NDArray[np.int32], num_kv_heads: int, group_heads: int) -> int:
    """Rows that `items` needs for chunks of so many tokens."""
    num_items = 0
    for tokens in chunk_tokens:
        num_items += (tokens + item_tokens(group_heads) - 1) // item_tokens(group_heads)
    return num_items * num_kv_heads


@kernel
def plan_prefill(chunk_tokens: NDArray[np.int32], num_kv_heads: int, group_heads: int, items: NDArray[np.int32]) -> int:
    """Fills `items` [at least num_prefill_items, 3] with (chunk, key head, first token); returns their number.

    Made once a step, used in every layer.
    """
    item = 0
    for chunk in range(chunk_tokens.size):
        for kv_head in range(num_kv_heads):
            for token in range(0, chunk_tokens[chunk], item_tokens(group_heads)):
                items[item, 0], items[item, 1], items[item, 2] = chunk, kv_head, token
                item += 1
    return item


@kernel
def prefill_scratch_floats(group_heads: int, head_dim: int) -> int:
    """Floats of a thread's row of `scratch`: for each row of an item its query, scores, two sums, two stats."""
    return item_tokens(group_heads) * group_heads * (3 * head_dim + BLOCK_TOKENS + 4)


@kernel
def paged_prefill(
    qkv: NDArray[np.float32],
    first_rows: NDArray[np.int32],
    chunk_tokens: NDArray[np.int32],
    ends: NDArray[np.int32],
    block_tables: NDArray[np.int32],
    pages: NDArray[np.float32],
    layer: int,
    group_heads: int,
    items: NDArray[np.int32],
    num_items: int,
    scratch: NDArray[np.float32],
    attended: NDArray[np.float32],
    thread: int,
    num_threads: int,
) -> None:
    """This thread's share of the items.

    Args:
        qkv: [tokens, …]: rows that begin with the rotated queries, heads in order.
        first_rows: [chunks]: the row of `qkv` that is a chunk's first; its others follow.
        chunk_tokens: [chunks]: how many rows a chunk has, at least 1.
        ends: [chunks]: the position behind a chunk's last token; row r attends to positions up to its own.
        block_tables: [chunks, pages]: page ids in order of position, as many as `ends` needs.
        pages: [num_pages, num_layers, 2, num_kv_heads, PAGE_TOKENS * head_dim], see `weir.kv.geometry`.
        layer: Which layer's pages.
        group_heads: Query heads a key head.
        items: [items, 3] of `plan_prefill`.
        num_items: How many of them count.
        scratch: [num_threads, prefill_scratch_floats].
        attended: [tokens, num_heads * head_dim]: results, in the rows of `qkv`.
        thread: In 0 … num_threads - 1.
        num_threads: Among how many threads the items are shared.
    """
    for item in range(thread, num_items, num_threads):
        chunk, kv_head, first_token = items[item, 0], items[item, 1], items[item, 2]
        _attend_item(
            qkv,
            first_rows[chunk] + first_token,
            min(chunk_tokens[chunk] - first_token, item_tokens(group_heads)),
            ends[chunk] - chunk_tokens[chunk] + first_token,
            block_tables[chunk],
            pages,
            layer,
            kv_head,
            group_heads,
            scratch[thread],
            attended,
        )


@kernel
def _attend_item(
    qkv: NDArray[np.float32],
    first_row: int,
    num_tokens: int,
    first_position: int,
    block_table: NDArray[np.int32],
    pages: NDArray[np.float32],
    layer: int,
    kv_head: int,
    group_heads: int,
    scratch: NDArray[np.float32],
    attended: NDArray[np.float32],
) -> None:
    head_dim = pages.shape[4] // PAGE_TOKENS
    num_rows = num_tokens * group_heads
    query_floats = group_heads * head_dim
    first_column = kv_head * query_floats
    scale = softmax_scale(head_dim)
    head = head_pages(pages, layer, kv_head)
    size = num_rows * head_dim
    queries, sums, block_sums = scratch[:size], scratch[size : 2 * size], scratch[2 * size : 3 * size]
    stats, block_stats = scratch[3 * size :][: 2 * num_rows], scratch[3 * size + 2 * num_rows :][: 2 * num_rows]
    scores = address_of(scratch) + (3 * size + 4 * num_rows) * _FLOAT_BYTES
    for token in range(num_tokens):
        for column in range(query_floats):
            queries[token * query_floats + column] = qkv[first_row + token, first_column + column]
    for block_start in range(0, first_position + num_tokens, BLOCK_TOKENS):
        # rows before the block's first position do not see it
        skipped = max(0, block_start - first_position) * group_heads
        seen = first_position + skipped // group_heads + 1 - block_start
        page_ids = block_table[block_start // PAGE_TOKENS :][:BLOCK_PAGES]
        here = head.keys + page_ids[0] * head.stride
        row_bytes = head_dim * _FLOAT_BYTES
        into = sums if block_start == 0 else block_sums
        into_stats = stats if block_start == 0 else block_stats
        into[skipped * head_dim :] = 0.0
        score_block(
            address_of(queries) + skipped * row_bytes,
            row_bytes,
            num_rows - skipped,
            group_heads,
            seen,
            head,
            page_ids,
            here,
            head_dim,
            scores,
        )
        soften_block(
            scores, num_rows - skipped, group_heads, seen, scale, address_of(into_stats) + skipped * 2 * _FLOAT_BYTES
        )
        weigh_block(
            num_rows - skipped,
            group_heads,
            seen,
            head,
            page_ids,
            here,
            head_dim,
            scores,
            address_of(into) + skipped * row_bytes,
        )
        if block_start > 0:
            for row in range(skipped, num_rows):
                at = row * head_dim
                merge_row(
                    sums[at : at + head_dim],
                    stats[2 * row : 2 * row + 2],
                    block_sums[at : at + head_dim],
                    block_stats[2 * row : 2 * row + 2],
                    scale,
                )
    for token in range(num_tokens):
        for column in range(query_floats):
            at = token * query_floats + column
            attended[first_row + token, first_column + column] = sums[at] / stats[2 * (at // head_dim) + 1]


@parallel_kernel
def paged_prefill_parallel(
    qkv: NDArray[np.float32],
    first_rows: NDArray[np.int32],
    chunk_tokens: NDArray[np.int32],
    ends: NDArray[np.int32],
    block_tables: NDArray[np.int32],
    pages: NDArray[np.float32],
    layer: int,
    group_heads: int,
    items: NDArray[np.int32],
    num_items: int,
    scratch: NDArray[np.float32],
    attended: NDArray[np.float32],
) -> None:
    """`paged_prefill` on as many of numba's threads as `scratch` has rows."""
    num_threads = scratch.shape[0]
    for thread in prange(num_threads):
        paged_prefill(
            qkv,
            first_rows,
            chunk_tokens,
            ends,
            block_tables,
            pages,
            layer,
            group_heads,
            items,
            num_items,
            scratch,
            attended,
            thread,
            num_threads,
        )

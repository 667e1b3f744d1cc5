"""Decode attention on a CPU, over pages in place.

One work item is a sequence, a key head and a block of BLOCK_TOKENS positions; an item's result (weighted values,
largest score and sum of weights of the query heads that share the key head) lies in its row of `partials` until the
items of a sequence and head are merged, in order. Items depend on lengths alone, and so do the bits of a result.
"""

import numpy as np
from numpy.typing import NDArray

from weir.kv.geometry import PAGE_TOKENS
from weir.ops.cpu.attention import (
    BLOCK_PAGES,
    BLOCK_TOKENS,
    STATS_FLOATS,
    Scoring,
    head_pages,
    score_block,
    soften_block,
    weigh_block,
)
from weir.ops.simd.attention import finish_row, merge_row
from weir.ops.simd.float import FLOAT_BYTES
from weir.ops.simd.jit import kernel
from weir.ops.simd.loops import address_of


@kernel
def _first_block(length: int, window: int) -> int:
    """Blocks stay where they are, whatever the window: the first one is cut by a mask."""
    return max(0, length - window) // BLOCK_TOKENS


@kernel
def num_decode_items(lengths: NDArray[np.int32], num_kv_heads: int, window: int) -> int:
    """Rows that `items` and `partials` need for sequences of these lengths, of which `window` positions are seen."""
    num_blocks = 0
    for length in lengths:
        num_blocks += (length + BLOCK_TOKENS - 1) // BLOCK_TOKENS - _first_block(length, window)
    return num_blocks * num_kv_heads


@kernel
def plan_decode(lengths: NDArray[np.int32], num_kv_heads: int, window: int, items: NDArray[np.int32]) -> int:
    """Fills `items` [at least num_decode_items, 3] with (sequence, key head, block); returns their number.

    The items of a sequence and head are neighbours, in order of their blocks. Made once a step, used in every layer
    with this window.
    """
    item = 0
    for sequence in range(lengths.size):
        for kv_head in range(num_kv_heads):
            last = (lengths[sequence] + BLOCK_TOKENS - 1) // BLOCK_TOKENS
            for block in range(_first_block(lengths[sequence], window), last):
                items[item, 0], items[item, 1], items[item, 2] = sequence, kv_head, block
                item += 1
    return item


@kernel
def decode_partial_floats(group_heads: int, head_dim: int) -> int:
    """Floats of one row of `partials`, for `group_heads` query heads a key head."""
    return group_heads * (head_dim + STATS_FLOATS)


@kernel
def decode_scratch_floats(group_heads: int) -> int:
    """Floats of a thread's row of `scratch`."""
    return group_heads * BLOCK_TOKENS


@kernel
def decode_blocks(
    qkv: NDArray[np.float32],
    rows: NDArray[np.int32],
    lengths: NDArray[np.int32],
    block_tables: NDArray[np.int32],
    pages: NDArray[np.uint16],
    layer: int,
    group_heads: int,
    scoring: Scoring,
    items: NDArray[np.int32],
    num_items: int,
    partials: NDArray[np.float32],
    scratch: NDArray[np.float32],
    thread: int,
    num_threads: int,
) -> None:
    """First half of decode attention: this thread's share of the items. All threads end it before any merges.

    Args:
        qkv: [tokens, …]: rows that begin with the rotated queries, heads in order.
        rows: [sequences]: which row of `qkv` is a sequence's.
        lengths: [sequences]: positions to attend to, the query's own included, at least 1.
        block_tables: [sequences, pages]: page ids in order of position, as many as the length needs.
        pages: [num_pages, num_layers, 2, num_kv_heads, PAGE_TOKENS * head_dim] bfloat16, see `weir.kv.geometry`.
        layer: Which layer's pages.
        group_heads: Query heads a key head.
        scoring: What the layer does.
        items: [items, 3] of `plan_decode`, for the window of `scoring`.
        num_items: How many of them count.
        partials: [items, decode_partial_floats]: results.
        scratch: [num_threads, decode_scratch_floats].
        thread: In 0 … num_threads - 1.
        num_threads: Among how many threads the items are shared.
    """
    head_dim = pages.shape[4] // PAGE_TOKENS
    scores = address_of(scratch) + thread * scratch.shape[1] * FLOAT_BYTES
    head_bytes = head_dim * FLOAT_BYTES
    last = num_items * (thread + 1) // num_threads
    for item in range(num_items * thread // num_threads, last):
        sequence, kv_head, block = items[item, 0], items[item, 1], items[item, 2]
        head = head_pages(pages, layer, kv_head)
        page_ids = block_tables[sequence, block * BLOCK_PAGES :]
        length = lengths[sequence] - block * BLOCK_TOKENS
        num_tokens = min(length, BLOCK_TOKENS)
        following = min(item + 1, last - 1)
        ahead = head_pages(pages, layer, items[following, 1])
        ahead_page = block_tables[items[following, 0], items[following, 2] * BLOCK_PAGES]
        queries = address_of(qkv) + rows[sequence] * qkv.shape[1] * FLOAT_BYTES + kv_head * group_heads * head_bytes
        sums = address_of(partials) + item * partials.shape[1] * FLOAT_BYTES
        first_values = head.values + page_ids[0] * head.stride
        score_block(
            queries,
            head_bytes,
            group_heads,
            group_heads,
            num_tokens,
            head,
            page_ids,
            first_values,
            head_dim,
            scores,
        )
        soften_block(scores, group_heads, group_heads, length, scoring, sums + group_heads * head_bytes)
        weigh_block(
            group_heads,
            group_heads,
            num_tokens,
            head,
            page_ids,
            ahead.keys + ahead_page * ahead.stride,
            head_dim,
            scores,
            sums,
        )


@kernel
def _are_alike(items: NDArray[np.int32], one: int, other: int) -> bool:
    """Of one sequence and key head."""
    return bool(items[one, 0] == items[other, 0] and items[one, 1] == items[other, 1])


@kernel
def decode_merge(
    rows: NDArray[np.int32],
    items: NDArray[np.int32],
    num_items: int,
    group_heads: int,
    head_dim: int,
    scale: np.float32,
    partials: NDArray[np.float32],
    attended: NDArray[np.float32],
    thread: int,
    num_threads: int,
) -> None:
    """Second half: merges the blocks of each sequence and head into `attended` [tokens, num_heads * head_dim].

    A sequence's row there is that of its query in `qkv`; `scale` is that of the layer's scoring. The other arguments
    are those of `decode_blocks`.
    """
    head_bytes, stats_bytes = head_dim * FLOAT_BYTES, STATS_FLOATS * FLOAT_BYTES
    item_bytes = partials.shape[1] * FLOAT_BYTES
    first_sequence, last_sequence = rows.size * thread // num_threads, rows.size * (thread + 1) // num_threads
    for item in range(num_items):
        if not first_sequence <= items[item, 0] < last_sequence or (item > 0 and _are_alike(items, item - 1, item)):
            continue
        num_blocks = 1
        while item + num_blocks < num_items and _are_alike(items, item, item + num_blocks):
            num_blocks += 1
        merged = address_of(partials) + item * item_bytes
        row_bytes = rows[items[item, 0]] * attended.shape[1] * FLOAT_BYTES
        first_head = address_of(attended) + row_bytes + items[item, 1] * group_heads * head_bytes
        for head in range(group_heads):
            sums, stats = merged + head * head_bytes, merged + group_heads * head_bytes + head * stats_bytes
            for block in range(1, num_blocks):
                merge_row(sums, stats, sums + block * item_bytes, stats + block * item_bytes, head_dim, scale)
            finish_row(sums, stats, head_dim, first_head + head * head_bytes)

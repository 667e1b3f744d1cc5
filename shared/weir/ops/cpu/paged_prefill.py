"""Prefill attention on a CPU, over pages in place.

One work item is a chunk, a key head and some query tokens; the query heads of that key head make `group_heads` rows of
each token, so that every key and value read serves up to ITEM_ROWS rows. A row's operations are those of decode, in the
same order: it has the same bits whether its token came alone or in a chunk of any size.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weir.kv.geometry import PAGE_TOKENS
from weir.ops.cpu.attention import (
    BLOCK_TOKENS,
    STATS_FLOATS,
    HeadPages,
    Scoring,
    head_pages,
    score_block,
    soften_block,
    weigh_block,
)
from weir.ops.simd.attention import copy_floats, finish_row, merge_row
from weir.ops.simd.float import FLOAT_BYTES
from weir.ops.simd.jit import kernel
from weir.ops.simd.loops import address_of

ITEM_ROWS = 48

_IS_FIRST, _IS_LATER = np.bool_(True), np.bool_(False)
"""Not Python's own: of those numba compiles what they are handed to once for each."""
_STATS_BYTES = STATS_FLOATS * FLOAT_BYTES


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
    return item_tokens(group_heads) * group_heads * (3 * head_dim + BLOCK_TOKENS + 2 * STATS_FLOATS)


@kernel
def paged_prefill(
    qkv: NDArray[np.float32],
    first_rows: NDArray[np.int32],
    chunk_tokens: NDArray[np.int32],
    ends: NDArray[np.int32],
    block_tables: NDArray[np.int32],
    pages: NDArray[np.uint16],
    layer: int,
    group_heads: int,
    scoring: Scoring,
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
        pages: [num_pages, num_layers, 2, num_kv_heads, PAGE_TOKENS * head_dim] bfloat16, see `weir.kv.geometry`.
        layer: Which layer's pages.
        group_heads: Query heads a key head.
        scoring: What the layer does.
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
            scoring,
            scratch[thread],
            attended,
        )


class _Buffers(NamedTuple):
    """Addresses of an item's rows: packed queries, weighted values and stats of all blocks and of one, scores."""

    queries: int
    sums: int
    stats: int
    block_sums: int
    block_stats: int
    scores: int


@kernel
def _buffers(scratch: NDArray[np.float32], num_rows: int, head_dim: int) -> _Buffers:
    rows_bytes = num_rows * head_dim * FLOAT_BYTES
    queries = address_of(scratch)
    block_sums = queries + 2 * rows_bytes
    stats = block_sums + rows_bytes
    block_stats = stats + num_rows * _STATS_BYTES
    return _Buffers(
        queries, queries + rows_bytes, stats, block_sums, block_stats, block_stats + num_rows * _STATS_BYTES
    )


@kernel
def _attend_block(
    buffers: _Buffers,
    num_tokens: int,
    group_heads: int,
    first_position: int,
    block_start: int,
    head: HeadPages,
    page_ids: NDArray[np.int32],
    head_dim: int,
    scoring: Scoring,
) -> None:
    """One block for the tokens that see it. With a window w, p the block's first position, q an item's first:

    tokens   0 .......... p - q .......... p - q + w - 1 .......... p - q + w - 1 + BLOCK_TOKENS .......
             stand before |-- merged with earlier blocks --|-- it is their first --| have left it behind
    """
    shown = max(0, block_start - first_position)
    starting = block_start + scoring.window - 1 - first_position
    last = min(num_tokens, starting + BLOCK_TOKENS)
    starting = min(last, max(shown, starting)) if block_start > 0 else shown
    position = first_position - block_start
    if shown < starting:
        _attend_rows(buffers, shown, starting, group_heads, position, _IS_LATER, head, page_ids, head_dim, scoring)
    if starting < last:
        _attend_rows(buffers, starting, last, group_heads, position, _IS_FIRST, head, page_ids, head_dim, scoring)


@kernel
def _attend_rows(
    buffers: _Buffers,
    first: int,
    last: int,
    group_heads: int,
    position: int,
    is_first: np.bool_,
    head: HeadPages,
    page_ids: NDArray[np.int32],
    head_dim: int,
    scoring: Scoring,
) -> None:
    """One block for the rows of tokens [first, last), which see it and no block before it if `is_first`; the item's
    token 0 stands `position` behind the block's beginning."""
    skipped, num_rows = first * group_heads, (last - first) * group_heads
    end = position + first + 1
    row_bytes = head_dim * FLOAT_BYTES
    sums = (buffers.sums if is_first else buffers.block_sums) + skipped * row_bytes
    stats = (buffers.stats if is_first else buffers.block_stats) + skipped * _STATS_BYTES
    # read again and again by the other items: no need to fetch ahead of the block
    ahead = head.keys + page_ids[0] * head.stride
    queries = buffers.queries + skipped * row_bytes
    score_block(queries, row_bytes, num_rows, group_heads, end, head, page_ids, ahead, head_dim, buffers.scores)
    soften_block(buffers.scores, num_rows, group_heads, end, scoring, stats)
    weigh_block(num_rows, group_heads, end, head, page_ids, ahead, head_dim, buffers.scores, sums)
    if not is_first:
        for row in range(skipped, skipped + num_rows):
            merge_row(
                buffers.sums + row * row_bytes,
                buffers.stats + row * _STATS_BYTES,
                buffers.block_sums + row * row_bytes,
                buffers.block_stats + row * _STATS_BYTES,
                head_dim,
                scoring.scale,
            )


@kernel
def _attend_item(
    qkv: NDArray[np.float32],
    first_row: int,
    num_tokens: int,
    first_position: int,
    block_table: NDArray[np.int32],
    pages: NDArray[np.uint16],
    layer: int,
    kv_head: int,
    group_heads: int,
    scoring: Scoring,
    scratch: NDArray[np.float32],
    attended: NDArray[np.float32],
) -> None:
    head_dim = pages.shape[4] // PAGE_TOKENS
    num_rows = num_tokens * group_heads
    row_bytes = head_dim * FLOAT_BYTES
    group_bytes = group_heads * row_bytes
    head = head_pages(pages, layer, kv_head)
    buffers = _buffers(scratch, num_rows, head_dim)
    for token in range(num_tokens):
        source = address_of(qkv) + (first_row + token) * qkv.shape[1] * FLOAT_BYTES + kv_head * group_bytes
        copy_floats(source, group_heads * head_dim, buffers.queries + token * group_bytes)
    first_block = max(0, first_position + 1 - scoring.window) // BLOCK_TOKENS
    for block_start in range(first_block * BLOCK_TOKENS, first_position + num_tokens, BLOCK_TOKENS):
        page_ids = block_table[block_start // PAGE_TOKENS :]
        _attend_block(buffers, num_tokens, group_heads, first_position, block_start, head, page_ids, head_dim, scoring)
    for token in range(num_tokens):
        target = address_of(attended) + (first_row + token) * attended.shape[1] * FLOAT_BYTES + kv_head * group_bytes
        for number in range(group_heads):
            row = token * group_heads + number
            sums, stats = buffers.sums + row * row_bytes, buffers.stats + row * _STATS_BYTES
            finish_row(sums, stats, head_dim, target + number * row_bytes)

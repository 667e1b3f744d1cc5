"""One block of context for some query rows, on a CPU: scores, weights, weighted values; and how blocks are merged.

A query's context is cut at positions BLOCK_TOKENS, 2 BLOCK_TOKENS, … Inside a block a row's largest score is taken
first and everything is summed in order of position; the blocks' results are merged in order (the two levels of
Flash-Decoding, Dao et al. 2023). Where the cuts are, and every operation of a row, follows from its position alone.

Pages hold bfloat16; `queries`, `scores`, `sums` and the like are byte addresses (int64) of float32 rows.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weir.kv.geometry import ATTENTION_BLOCK_TOKENS, PAGE_TOKENS
from weir.ops.simd.attention import SCORED_PAGES, TILE_ROWS, cap_row, score_pair, score_tile, soften_row, weigh_tile
from weir.ops.simd.bf16 import BF16_BYTES
from weir.ops.simd.float import FLOAT_BYTES
from weir.ops.simd.jit import kernel
from weir.ops.simd.loops import address_of

BLOCK_TOKENS = ATTENTION_BLOCK_TOKENS
BLOCK_PAGES = BLOCK_TOKENS // PAGE_TOKENS
STATS_FLOATS = 2
"""A row's largest score and the sum of its weights."""

_SCORE_STRIDE = BLOCK_TOKENS * FLOAT_BYTES

_LOG2_E = 1.4426950408889634


class HeadPages(NamedTuple):
    """Where the pages of one key head of one layer are: page p's keys at `keys + p * stride`, its values likewise."""

    keys: int
    values: int
    stride: int


@kernel
def head_pages(pages: NDArray[np.uint16], layer: int, kv_head: int) -> HeadPages:
    """`pages` [num_pages, num_layers, 2, num_kv_heads, PAGE_TOKENS * head_dim]."""
    _, num_layers, _, num_kv_heads, block_numbers = pages.shape
    block_bytes = block_numbers * BF16_BYTES
    keys = address_of(pages) + (layer * 2 * num_kv_heads + kv_head) * block_bytes
    return HeadPages(keys, keys + num_kv_heads * block_bytes, num_layers * 2 * num_kv_heads * block_bytes)


class Scoring(NamedTuple):
    """Which positions a query sees, and how products with their keys become weights.

    `window`: it sees at most so many positions, the last of which is its own. `scale`: what scores are multiplied with
    before two is raised to them. `cap_factor`, if it is not 0: a product s becomes the score tanh(s * cap_factor).
    """

    window: int
    scale: np.float32
    cap_factor: np.float32


NO_WINDOW = (1 << 31) - 1
"""A window that no context is longer than."""


def scoring_of(divisor: float, window: int = NO_WINDOW, softcap: float = 0.0) -> Scoring:
    """Products are divided by the square root of `divisor`, the size of a head in most models. Softcap c, if it is not
    0: after that s becomes c tanh(s / c) (Bello et al.: "Neural combinatorial optimization", 2016)."""
    root = np.sqrt(np.float64(divisor))
    if softcap == 0.0:
        return Scoring(window, np.float32(_LOG2_E / root), np.float32(0.0))
    return Scoring(window, np.float32(_LOG2_E * softcap), np.float32(1.0 / (root * softcap)))


@kernel
def score_block(
    queries: int,
    query_stride: int,
    num_rows: int,
    rows_per_token: int,
    num_tokens: int,
    head: HeadPages,
    page_ids: NDArray[np.int32],
    ahead: int,
    head_dim: int,
    scores: int,
) -> None:
    """Scores of rows against one block, each row's at `scores + row * BLOCK_TOKENS * 4`.

    The first `rows_per_token` rows see `num_tokens` tokens of the block, the next as many one more, and so on.
    `page_ids` are those of the block. `ahead`: what will be read next.
    """
    last_tokens = min(num_tokens + (num_rows - 1) // rows_per_token, BLOCK_TOKENS)
    num_pages = (last_tokens + PAGE_TOKENS - 1) // PAGE_TOKENS
    for page in range(0, num_pages, SCORED_PAGES):
        last_page = min(page + SCORED_PAGES, num_pages) - 1
        keys, last_keys = head.keys + page_ids[page] * head.stride, head.keys + page_ids[last_page] * head.stride
        fetched, last_fetched = ahead, last_keys
        if last_page + 1 < num_pages:
            fetched = head.keys + page_ids[last_page + 1] * head.stride
        if last_page + 2 < num_pages:
            last_fetched = head.keys + page_ids[last_page + 2] * head.stride
        for first in range(0, num_rows, TILE_ROWS):
            rows = min(num_rows - first, TILE_ROWS)
            seen = num_tokens + (first + rows - 1) // rows_per_token
            tile_queries = queries + first * query_stride
            into = scores + first * _SCORE_STRIDE + page * PAGE_TOKENS * FLOAT_BYTES
            if seen > last_page * PAGE_TOKENS and last_page > page:
                score_pair(
                    rows,
                    tile_queries,
                    query_stride,
                    keys,
                    fetched,
                    last_keys,
                    last_fetched,
                    head_dim,
                    into,
                    _SCORE_STRIDE,
                )
                fetched, last_fetched = keys, last_keys
            elif seen > page * PAGE_TOKENS:
                score_tile(rows, tile_queries, query_stride, keys, fetched, head_dim, into, _SCORE_STRIDE)
                fetched = keys


@kernel
def weigh_block(
    num_rows: int,
    rows_per_token: int,
    num_tokens: int,
    head: HeadPages,
    page_ids: NDArray[np.int32],
    ahead: int,
    head_dim: int,
    weights: int,
    sums: int,
) -> None:
    """The weighted values of one block: `sums` [num_rows, head_dim]. Arguments as those of `score_block`."""
    last_tokens = min(num_tokens + (num_rows - 1) // rows_per_token, BLOCK_TOKENS)
    num_pages = (last_tokens + PAGE_TOKENS - 1) // PAGE_TOKENS
    for page in range(num_pages):
        values = head.values + page_ids[page] * head.stride
        fetched = ahead if page + 1 == num_pages else head.values + page_ids[page + 1] * head.stride
        for first in range(0, num_rows, TILE_ROWS):
            rows = min(num_rows - first, TILE_ROWS)
            seen = min(num_tokens + (first + rows - 1) // rows_per_token, BLOCK_TOKENS) - page * PAGE_TOKENS
            if seen > 0:
                weigh_tile(
                    rows,
                    weights + first * _SCORE_STRIDE + page * PAGE_TOKENS * FLOAT_BYTES,
                    _SCORE_STRIDE,
                    values,
                    fetched,
                    head_dim,
                    min(seen, PAGE_TOKENS),
                    sums + first * head_dim * FLOAT_BYTES,
                    page == 0,
                )
                fetched = values


@kernel
def soften_block(
    scores: int, num_rows: int, rows_per_token: int, num_tokens: int, scoring: Scoring, stats: int
) -> None:
    """Scores become weights, each row relative to its largest score; that and the weights' sum go to `stats`.

    `num_tokens` as for `score_block`, but more than BLOCK_TOKENS where the rows stand behind the block. Every row sees
    a token of it.
    """
    last_tokens = min(num_tokens + (num_rows - 1) // rows_per_token, BLOCK_TOKENS)
    num_padded = (last_tokens + PAGE_TOKENS - 1) // PAGE_TOKENS * PAGE_TOKENS
    for row in range(num_rows):
        end = num_tokens + row // rows_per_token
        first, seen = max(0, end - scoring.window), min(end, BLOCK_TOKENS)
        row_scores, row_stats = scores + row * _SCORE_STRIDE, stats + row * STATS_FLOATS * FLOAT_BYTES
        if scoring.cap_factor > 0:
            cap_row(row_scores, num_padded, scoring.cap_factor)
        soften_row(row_scores, first, seen, num_padded, scoring.scale, row_stats)

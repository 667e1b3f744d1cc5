"""Sequences in pages of random order, the kernels over them, and float64 beside them.

Run as a program, prints a digest of many results: for comparing processes whose kernels were compiled differently.
"""

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tests.kernels.whole_ops import bf16_to_float32

from weir.kv.geometry import PAGE_TOKENS, num_pages_for
from weir.ops.cpu.attention import NO_WINDOW, Scoring, scoring_of
from weir.ops.cpu.paged_decode import (
    decode_blocks,
    decode_merge,
    decode_partial_floats,
    decode_scratch_floats,
    num_decode_items,
    plan_decode,
)
from weir.ops.cpu.paged_prefill import num_prefill_items, paged_prefill, plan_prefill, prefill_scratch_floats
from weir.ops.simd.bf16 import bf16_from

NUM_LAYERS, LAYER = 3, 1


@dataclass(frozen=True)
class Heads:
    """One layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int = NO_WINDOW
    softcap: float = 0.0

    @property
    def scoring(self) -> Scoring:
        return scoring_of(self.head_dim, self.window, self.softcap)

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def row_floats(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def __str__(self) -> str:
        bounds = ("" if self.window == NO_WINDOW else f"-window{self.window}") + ("-capped" if self.softcap else "")
        return f"{self.num_heads}-{self.num_kv_heads}x{self.head_dim}{bounds}"


SMOLLM2 = Heads(9, 3, 64)
WINDOWED = Heads(9, 3, 64, window=40)
ALL_HEADS = (
    SMOLLM2,
    Heads(4, 4, 128),
    Heads(8, 1, 64),
    Heads(14, 2, 80),
    Heads(3, 1, 8),
    Heads(32, 2, 96),
    WINDOWED,
    Heads(8, 4, 256, window=129, softcap=2.5),
)


@dataclass(frozen=True)
class World:
    """NaN wherever no sequence has a token. `keys`, `values` of a sequence: [tokens, kv heads, head_dim].

    They are what bfloat16 pages can hold, so that only arithmetic makes a difference.
    """

    heads: Heads
    pages: NDArray[np.uint16]
    block_tables: NDArray[np.int32]
    keys: list[NDArray[np.float32]]
    values: list[NDArray[np.float32]]


def make_world(heads: Heads, lengths: Sequence[int], seed: int) -> World:
    random = np.random.default_rng(seed)
    longest = num_pages_for(max(lengths))
    num_pages = sum(num_pages_for(length) for length in lengths) + 2
    shape = (num_pages, NUM_LAYERS, 2, heads.num_kv_heads, PAGE_TOKENS * heads.head_dim)
    pages = np.full(shape, np.nan, np.float32)
    free = random.permutation(num_pages).tolist()
    tables = np.full((len(lengths), longest), -1, np.int32)
    keys, values = (
        [_representable(random, (length, heads.num_kv_heads, heads.head_dim)) for length in lengths] for _ in range(2)
    )
    for sequence, length in enumerate(lengths):
        for page in range(num_pages_for(length)):
            tables[sequence, page] = free.pop()
        for position in range(length):
            place = position % PAGE_TOKENS
            page_keys, page_values = pages[tables[sequence, position // PAGE_TOKENS], LAYER]
            page_keys.reshape(heads.num_kv_heads, -1, PAGE_TOKENS)[:, :, place] = keys[sequence][position]
            page_values.reshape(heads.num_kv_heads, PAGE_TOKENS, -1)[:, place] = values[sequence][position]
    return World(heads, bf16_from(pages), tables, keys, values)


def _representable(random: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    return bf16_to_float32(bf16_from(random.standard_normal(shape, np.float32)))


def make_queries(heads: Heads, num_rows: int, seed: int) -> NDArray[np.float32]:
    """Rows as the projection gives them: queries, and keys and values that attention must not look at."""
    rows = np.random.default_rng(seed).standard_normal((num_rows, heads.row_floats), np.float32)
    rows[:, heads.num_heads * heads.head_dim :] = np.nan
    return rows


def decode(
    world: World, qkv: NDArray[np.float32], sequences: Sequence[int], lengths: Sequence[int], num_threads: int = 1
) -> NDArray[np.float32]:
    """Row i of `qkv` is sequence `sequences[i]` at its first `lengths[i]` positions. [rows, heads, head_dim]."""
    heads = world.heads
    seen, rows = np.array(lengths, np.int32), np.arange(len(lengths), dtype=np.int32)
    tables = np.ascontiguousarray(world.block_tables[list(sequences)])
    items = np.empty((num_decode_items(seen, heads.num_kv_heads, heads.window) + 1, 3), np.int32)
    count = plan_decode(seen, heads.num_kv_heads, heads.window, items)
    assert count == len(items) - 1
    partials = np.full((count, decode_partial_floats(heads.group, heads.head_dim)), np.nan, np.float32)
    scratch = np.full((num_threads, decode_scratch_floats(heads.group)), np.nan, np.float32)
    attended = np.full((len(rows), heads.num_heads * heads.head_dim), np.nan, np.float32)
    for thread in reversed(range(num_threads)):
        decode_blocks(
            qkv,
            rows,
            seen,
            tables,
            world.pages,
            LAYER,
            heads.group,
            heads.scoring,
            items,
            count,
            partials,
            scratch,
            thread,
            num_threads,
        )
    for thread in reversed(range(num_threads)):
        decode_merge(
            rows,
            items,
            count,
            heads.group,
            heads.head_dim,
            heads.scoring.scale,
            partials,
            attended,
            thread,
            num_threads,
        )
    return attended.reshape(len(rows), heads.num_heads, heads.head_dim)


def prefill(
    world: World, qkv: NDArray[np.float32], chunks: Sequence[tuple[int, int, int]], num_threads: int = 1
) -> NDArray[np.float32]:
    """Chunks (sequence, first position, position behind the last) whose rows follow one another in `qkv`."""
    heads = world.heads
    tokens = np.array([end - start for _, start, end in chunks], np.int32)
    first_rows = (np.cumsum(tokens) - tokens).astype(np.int32)
    ends = np.array([end for *_, end in chunks], np.int32)
    tables = np.ascontiguousarray(world.block_tables[[sequence for sequence, *_ in chunks]])
    items = np.empty((num_prefill_items(tokens, heads.num_kv_heads, heads.group) + 1, 3), np.int32)
    count = plan_prefill(tokens, heads.num_kv_heads, heads.group, items)
    scratch = np.full((num_threads, prefill_scratch_floats(heads.group, heads.head_dim)), np.nan, np.float32)
    attended = np.full((len(qkv), heads.num_heads * heads.head_dim), np.nan, np.float32)
    for thread in reversed(range(num_threads)):
        paged_prefill(
            qkv,
            first_rows,
            tokens,
            ends,
            tables,
            world.pages,
            LAYER,
            heads.group,
            heads.scoring,
            items,
            count,
            scratch,
            attended,
            thread,
            num_threads,
        )
    return attended.reshape(len(qkv), heads.num_heads, heads.head_dim)


def attend_in_float64(
    world: World, qkv: NDArray[np.float32], sequence: int, lengths: Sequence[int]
) -> NDArray[np.float64]:
    """Row i sees the window's of the first `lengths[i]` positions of the sequence. [rows, heads, head_dim]."""
    heads = world.heads
    queries = qkv[:, : heads.num_heads * heads.head_dim].astype(np.float64).reshape(-1, *_grouped(heads))
    keys, values = (x[sequence].astype(np.float64) for x in (world.keys, world.values))
    scores = np.einsum("rkgd,tkd->rkgt", queries, keys) / np.sqrt(heads.head_dim)
    if heads.softcap:
        scores = heads.softcap * np.tanh(scores / heads.softcap)
    positions, ends = np.arange(len(keys)), np.array(lengths)[:, None]
    hidden = (positions >= ends) | (positions < ends - heads.window)
    scores[np.broadcast_to(hidden[:, None, None], scores.shape)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    attended: NDArray[np.float64] = np.einsum("rkgt,tkd->rkgd", weights / weights.sum(axis=-1, keepdims=True), values)
    return attended.reshape(-1, heads.num_heads, heads.head_dim)


def _grouped(heads: Heads) -> tuple[int, int, int]:
    return heads.num_kv_heads, heads.group, heads.head_dim


def digest_of_results() -> str:
    """Of everything that a compiler could do differently: all slices of a head, tiles of every size, several blocks."""
    digest = hashlib.sha256()
    for seed, heads in enumerate(ALL_HEADS):
        lengths = (1, 15, 33, 129, 300)
        world = make_world(heads, lengths, seed)
        rows = make_queries(heads, len(lengths), seed)
        digest.update(decode(world, rows, range(len(lengths)), lengths).tobytes())
        digest.update(prefill(world, make_queries(heads, 300, seed), [(4, 0, 300)]).tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    sys.stdout.write(digest_of_results())

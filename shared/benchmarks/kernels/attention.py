"""How fast attention reads pages on this CPU, beside its memory bandwidth and beside gathering pages for torch.

Keys and values are cold, as they are in a step of a whole model: layers and sets of sequences take turns over more
memory than the caches hold. Kernel and torch alternate; torch gets the same numbers, in its best page layout. Times are
the fastest of some passes, since other programs only ever make them longer.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from benchmarks.kernels.limits import COLD_BYTES, LEAST_PASSES, SECONDS, read_bandwidth
from weir.kv.geometry import PAGE_TOKENS, num_pages_for
from weir.model.cpu.core_share import FixedShare
from weir.model.cpu.threads import ThreadTeam, most_chunks
from weir.ops.cpu import paged_decode as decode
from weir.ops.cpu import paged_prefill as prefill
from weir.ops.cpu.attention import NO_WINDOW, Scoring, scoring_of
from weir.ops.simd.bf16 import BF16_BYTES, bf16_from
from weir.ops.simd.jit import kernel
from weir.ops.simd.phases import PhaseState, chunk_is_done, take_chunk, wait_for_phase

_GROUP_HEADS, _NUM_KV_HEADS, _HEAD_DIM = 3, 3, 64  # of SmolLM2-135M
_NUM_HEADS = _GROUP_HEADS * _NUM_KV_HEADS
_SCORING = scoring_of(_HEAD_DIM)
_NUM_LAYERS = 30
_MOST_BYTES = 512 << 20
_DECODES = ((1, 160), (8, 160), (32, 160), (32, 500), (32, 2000))
_PREFILLS = ((64, 0), (64, 500), (128, 0))

Tables = NDArray[np.int32]
Pass = Callable[[Tables], None]


@dataclass(frozen=True, slots=True)
class AttentionTime:
    """One layer's attention. `read_gb_s` counts the keys and values of the context once."""

    name: str
    kernel_us: float
    torch_us: float
    read_gb_s: float
    bandwidth_gb_s: float
    gflop_s: float

    @property
    def ratio(self) -> float:
        """How many times faster than gathering for torch."""
        return self.torch_us / self.kernel_us

    @property
    def bandwidth_share(self) -> float:
        return self.read_gb_s / self.bandwidth_gb_s


@dataclass(frozen=True, slots=True)
class _World:
    """Sequences of one length in pages of random order: `block_tables` [sets, sequences, pages]."""

    pages: NDArray[np.uint16]
    block_tables: Tables

    @property
    def num_layers(self) -> int:
        return int(self.pages.shape[1])


def measure(num_threads: int) -> tuple[AttentionTime, ...]:
    """Takes about half a minute and 1 GiB. Sets torch's number of threads for the whole process."""
    bandwidth = read_bandwidth(num_threads)
    torch.set_num_threads(num_threads)
    decodes = [measure_decode(batch, length, num_threads, bandwidth) for batch, length in _DECODES]
    prefills = [measure_prefill(new, cached, num_threads, bandwidth) for new, cached in _PREFILLS]
    return (*decodes, *prefills)


def measure_decode(batch: int, length: int, num_threads: int, bandwidth_gb_s: float) -> AttentionTime:
    """`batch` sequences that attend to `length` positions each."""
    world = _make_world(batch, length)
    qkv = _random(batch, (_NUM_HEADS + 2 * _NUM_KV_HEADS) * _HEAD_DIM)
    rows, lengths = np.arange(batch, dtype=np.int32), np.full(batch, length, np.int32)
    num_items = decode.num_decode_items(lengths, _NUM_KV_HEADS, NO_WINDOW)
    items = np.empty((num_items, 3), np.int32)
    decode.plan_decode(lengths, _NUM_KV_HEADS, NO_WINDOW, items)
    partials = np.empty((num_items, decode.decode_partial_floats(_GROUP_HEADS, _HEAD_DIM)), np.float32)
    scratch = np.empty((most_chunks(num_threads), decode.decode_scratch_floats(_GROUP_HEADS)), np.float32)
    attended = np.empty((batch, _NUM_HEADS * _HEAD_DIM), np.float32)
    team = ThreadTeam(FixedShare(num_threads))

    def run_kernel(tables: Tables) -> None:
        def work(state: PhaseState, base: int, num_chunks: int) -> None:
            fixed = (qkv, rows, lengths, tables, world.pages, _SCORING, items, partials, scratch, attended)
            _decode_layers(*fixed, state, base, num_chunks)

        team.run(work, batch)

    queries = _queries_for_torch(qkv).view(batch, _NUM_KV_HEADS, _GROUP_HEADS, _HEAD_DIM)
    mask = torch.zeros(batch, 1, 1, num_pages_for(length) * PAGE_TOKENS, dtype=queries.dtype)
    mask[..., length:] = float("-inf")

    def run_torch(tables: Tables) -> None:
        for layer in range(world.num_layers):
            keys, values = _gather(world, tables, layer)
            functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)

    seconds = _fastest(world, run_kernel, run_torch)
    return _as_time(f"decode {batch} x {length}", batch * length, batch * length, seconds, bandwidth_gb_s)


def measure_prefill(num_new: int, num_cached: int, num_threads: int, bandwidth_gb_s: float) -> AttentionTime:
    """One sequence's chunk of `num_new` tokens behind `num_cached` others."""
    end = num_new + num_cached
    world = _make_world(1, end)
    qkv = _random(num_new, (_NUM_HEADS + 2 * _NUM_KV_HEADS) * _HEAD_DIM)
    first_rows, tokens, ends = (np.array([value], np.int32) for value in (0, num_new, end))
    items = np.empty((prefill.num_prefill_items(tokens, _NUM_KV_HEADS, _GROUP_HEADS), 3), np.int32)
    prefill.plan_prefill(tokens, _NUM_KV_HEADS, _GROUP_HEADS, items)
    scratch = np.empty((most_chunks(num_threads), prefill.prefill_scratch_floats(_GROUP_HEADS, _HEAD_DIM)), np.float32)
    attended = np.empty((num_new, _NUM_HEADS * _HEAD_DIM), np.float32)
    team = ThreadTeam(FixedShare(num_threads))

    def run_kernel(tables: Tables) -> None:
        def work(state: PhaseState, base: int, num_chunks: int) -> None:
            fixed = (qkv, first_rows, tokens, ends, tables, world.pages, _SCORING, items, scratch, attended)
            _prefill_layers(*fixed, state, base, num_chunks)

        team.run(work, num_new)

    queries = _queries_for_torch(qkv).view(num_new, -1, _HEAD_DIM).transpose(0, 1)[None]
    mask = torch.ones(num_new, end, dtype=torch.bool).tril_(num_cached)

    def run_torch(tables: Tables) -> None:
        for layer in range(world.num_layers):
            keys, values = (x[:, :, :end] for x in _gather(world, tables, layer))
            functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)

    num_pairs = num_new * num_cached + num_new * (num_new + 1) // 2
    seconds = _fastest(world, run_kernel, run_torch)
    return _as_time(f"prefill {num_new} on {num_cached}", end, num_pairs, seconds, bandwidth_gb_s)


@kernel
def _decode_layers(
    qkv: NDArray[np.float32],
    rows: NDArray[np.int32],
    lengths: NDArray[np.int32],
    tables: Tables,
    pages: NDArray[np.uint16],
    scoring: Scoring,
    items: NDArray[np.int32],
    partials: NDArray[np.float32],
    scratch: NDArray[np.float32],
    attended: NDArray[np.float32],
    state: PhaseState,
    base: int,
    num_chunks: int,
) -> None:
    count, group = len(items), _GROUP_HEADS
    phase = 0
    for layer in range(pages.shape[1]):
        chunk = take_chunk(state, base, phase, num_chunks)
        while chunk >= 0:
            decode.decode_blocks(
                qkv,
                rows,
                lengths,
                tables,
                pages,
                layer,
                group,
                scoring,
                items,
                count,
                partials,
                scratch,
                chunk,
                num_chunks,
            )
            chunk_is_done(state)
            chunk = take_chunk(state, base, phase, num_chunks)
        phase = wait_for_phase(state, base, phase, num_chunks)
        chunk = take_chunk(state, base, phase, num_chunks)
        while chunk >= 0:
            scale = scoring.scale
            decode.decode_merge(rows, items, count, group, _HEAD_DIM, scale, partials, attended, chunk, num_chunks)
            chunk_is_done(state)
            chunk = take_chunk(state, base, phase, num_chunks)
        phase = wait_for_phase(state, base, phase, num_chunks)


@kernel
def _prefill_layers(
    qkv: NDArray[np.float32],
    first_rows: NDArray[np.int32],
    tokens: NDArray[np.int32],
    ends: NDArray[np.int32],
    tables: Tables,
    pages: NDArray[np.uint16],
    scoring: Scoring,
    items: NDArray[np.int32],
    scratch: NDArray[np.float32],
    attended: NDArray[np.float32],
    state: PhaseState,
    base: int,
    num_chunks: int,
) -> None:
    count, group = len(items), _GROUP_HEADS
    chunks = (first_rows, tokens, ends)
    phase = 0
    for layer in range(pages.shape[1]):
        chunk = take_chunk(state, base, phase, num_chunks)
        while chunk >= 0:
            prefill.paged_prefill(
                qkv, *chunks, tables, pages, layer, group, scoring, items, count, scratch, attended, chunk, num_chunks
            )
            chunk_is_done(state)
            chunk = take_chunk(state, base, phase, num_chunks)
        phase = wait_for_phase(state, base, phase, num_chunks)


def _fastest(world: _World, run_kernel: Pass, run_torch: Pass) -> tuple[float, float]:
    """Seconds a layer, passes in turns over the sets."""
    seconds: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + SECONDS
    while len(seconds[0]) < LEAST_PASSES or time.perf_counter() < end:
        number = len(seconds[0])
        for run, times, place in zip((run_kernel, run_torch), seconds, (2 * number, 2 * number + 1), strict=True):
            tables = world.block_tables[place % len(world.block_tables)]
            start = time.perf_counter()
            run(tables)
            times.append((time.perf_counter() - start) / world.num_layers)
    kernel_s, torch_s = (min(times[1:]) for times in seconds)
    return kernel_s, torch_s


def _as_time(
    name: str, num_read_tokens: int, num_pairs: int, seconds: tuple[float, float], bandwidth_gb_s: float
) -> AttentionTime:
    """`num_pairs`: of a query token and a key token that meet."""
    kernel_s, torch_s = seconds
    read_bytes = num_read_tokens * 2 * _NUM_KV_HEADS * _HEAD_DIM * BF16_BYTES
    flop = num_pairs * 4 * _NUM_HEADS * _HEAD_DIM
    read_gb_s, gflop_s = read_bytes / kernel_s / 1e9, flop / kernel_s / 1e9
    return AttentionTime(name, kernel_s * 1e6, torch_s * 1e6, read_gb_s, bandwidth_gb_s, gflop_s)


def _queries_for_torch(qkv: NDArray[np.float32]) -> torch.Tensor:
    return torch.from_numpy(qkv[:, : _NUM_HEADS * _HEAD_DIM]).to(torch.bfloat16)


def _gather(world: _World, tables: Tables, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies, [sequences, heads, tokens, head_dim] each, as if keys lay by token too."""
    blocks = torch.from_numpy(world.pages).view(torch.bfloat16).view(-1, PAGE_TOKENS * _HEAD_DIM)
    heads = torch.arange(2 * _NUM_KV_HEADS).view(2, _NUM_KV_HEADS, 1)
    first_blocks = (torch.from_numpy(tables).long() * world.num_layers + layer) * (2 * _NUM_KV_HEADS)
    found = blocks.index_select(0, (first_blocks[:, None, None, :] + heads).view(-1))
    found = found.view(len(tables), 2, _NUM_KV_HEADS, -1, _HEAD_DIM)
    return found[:, 0], found[:, 1]


def _make_world(batch: int, length: int) -> _World:
    pages_a_set = batch * num_pages_for(length)
    layer_bytes = 2 * _NUM_KV_HEADS * PAGE_TOKENS * _HEAD_DIM * BF16_BYTES
    num_layers = min(_NUM_LAYERS, _MOST_BYTES // (pages_a_set * layer_bytes))
    num_sets = -(-COLD_BYTES // (pages_a_set * layer_bytes * num_layers))
    num_pages = num_sets * pages_a_set
    numbers = bf16_from(_random(num_pages, num_layers * layer_bytes // BF16_BYTES))
    pages = numbers.reshape(num_pages, num_layers, 2, _NUM_KV_HEADS, -1)
    page_ids = np.random.default_rng(1).permutation(num_pages).astype(np.int32)
    return _World(pages, page_ids.reshape(num_sets, batch, num_pages_for(length)))


def _random(rows: int, columns: int) -> NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal((rows, columns), np.float32)


def as_lines(times: Sequence[AttentionTime]) -> list[str]:
    """A table in plain text."""
    heading = f"{'':18} {'us':>9} {'GB/s':>6} {'share':>6} {'GFLOP/s':>8} {'torch us':>9} {'ratio':>6}"
    return [
        heading,
        *(
            f"{t.name:18} {t.kernel_us:9.1f} {t.read_gb_s:6.1f} {t.bandwidth_share:6.0%} {t.gflop_s:8.1f} "
            f"{t.torch_us:9.1f} {t.ratio:6.2f}"
            for t in times
        ),
    ]

"""Attention on CPUs: right, and to the bit the same whatever stands beside a query."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.kernels.cpu_attention_cases import (
    ALL_HEADS,
    LAYER,
    NUM_LAYERS,
    SMOLLM2,
    WINDOWED,
    Heads,
    World,
    attend_in_float64,
    decode,
    digest_of_results,
    make_queries,
    make_world,
    prefill,
)
from tests.kernels.whole_ops import bf16_to_float32

from weir.kv.geometry import PAGE_TOKENS, first_page_read
from weir.ops.simd.bf16 import bf16_from

ROOT = Path(__file__).parents[2]
TOLERANCE = 2e-6  # scores reach 5 and are sums of 128 rounded steps; values are of the size of 1
LENGTHS = (1, 15, 16, 17, 33, 127, 128, 129, 500)
LONGEST = len(LENGTHS) - 1
SEVEN = bf16_from(np.array([7.0], np.float32))[0]

any_heads = pytest.mark.parametrize("heads", ALL_HEADS, ids=str)


def assert_same_bits(found: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    assert np.array_equal(found.view(np.int32), expected.view(np.int32))


@any_heads
def test_decode_is_attention_at_odd_lengths(heads: Heads) -> None:
    world = make_world(heads, LENGTHS, seed=1)
    rows = make_queries(heads, len(LENGTHS), seed=2)
    found = decode(world, rows, range(len(LENGTHS)), LENGTHS)
    for sequence, length in enumerate(LENGTHS):
        expected = attend_in_float64(world, rows[sequence : sequence + 1], sequence, [length])
        np.testing.assert_allclose(found[sequence : sequence + 1], expected, atol=TOLERANCE, rtol=0)


@any_heads
@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, 33), (0, 150), (120, 140), (128, 129), (436, 500)])
def test_prefill_is_causal_attention(start: int, end: int, heads: Heads) -> None:
    world = make_world(heads, [end], seed=3)
    rows = make_queries(heads, end - start, seed=4)
    expected = attend_in_float64(world, rows, 0, range(start + 1, end + 1))
    np.testing.assert_allclose(prefill(world, rows, [(0, start, end)]), expected, atol=TOLERANCE, rtol=0)


@any_heads
def test_a_prompt_has_the_bits_of_its_tokens_one_by_one(heads: Heads) -> None:
    world = make_world(heads, [300], seed=5)
    rows = make_queries(heads, 300, seed=6)
    assert_same_bits(prefill(world, rows, [(0, 0, 300)]), decode(world, rows, [0] * 300, range(1, 301)))


@settings(max_examples=30, deadline=None)
@given(
    cuts=st.sets(st.integers(1, 299), max_size=12),
    num_threads=st.integers(1, 4),
    window=st.sampled_from([SMOLLM2.window, 1, 40, 127, 128, 129, 200]),
)
def test_any_cut_into_chunks_gives_the_same_bits(cuts: set[int], num_threads: int, window: int) -> None:
    heads = replace(SMOLLM2, window=window)
    world = make_world(heads, [300], seed=7)
    rows = make_queries(heads, 300, seed=8)
    whole = prefill(world, rows, [(0, 0, 300)])
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), 300], strict=True):
        found = prefill(world, np.ascontiguousarray(rows[start:end]), [(0, start, end)], num_threads)
        assert_same_bits(found, whole[start:end])


@pytest.mark.parametrize("length", [40, 41, 167, 168, 169, 300])
def test_what_lies_before_the_window_never_matters(length: int) -> None:
    world = make_world(WINDOWED, [length], seed=22)
    rows = make_queries(WINDOWED, 1, seed=23)
    before = decode(world, rows, [0], [length])
    other = World(WINDOWED, world.pages.copy(), world.block_tables, world.keys, world.values)
    for position in range(length - WINDOWED.window):
        place = other.pages[other.block_tables[0, position // PAGE_TOKENS], LAYER]
        place[0].reshape(3, -1, PAGE_TOKENS)[:, :, position % PAGE_TOKENS] = SEVEN
        place[1].reshape(3, PAGE_TOKENS, -1)[:, position % PAGE_TOKENS] = SEVEN
    assert_same_bits(decode(other, rows, [0], [length]), before)
    assert_same_bits(prefill(other, rows, [(0, length - 1, length)]), before)
    first_seen = length - WINDOWED.window
    other.pages[other.block_tables[0, first_seen // PAGE_TOKENS], LAYER, 1] = SEVEN
    assert not np.array_equal(decode(other, rows, [0], [length]), before)


@pytest.mark.parametrize(("window", "length"), [(40, 166), (40, 167), (1, 128), (1, 129), (160, 287), (300, 700)])
def test_pages_that_are_given_back_may_hold_anything_and_need_not_be_there(window: int, length: int) -> None:
    heads = replace(SMOLLM2, window=window)
    world = make_world(heads, [length], seed=22)
    rows = make_queries(heads, 20, seed=23)

    def last(seen: World) -> NDArray[np.float32]:
        return decode(seen, rows[:1], [0], [length])

    def last_20(seen: World) -> NDArray[np.float32]:
        return prefill(seen, rows, [(0, length - 20, length)])

    for attend, num_queries in ((last, 1), (last_20, 20)):
        num_given_back = first_page_read(length - num_queries, window)
        other = World(heads, world.pages.copy(), world.block_tables.copy(), world.keys, world.values)
        other.pages[other.block_tables[0, :num_given_back]] = bf16_from(np.array([np.nan], np.float32))[0]
        other.block_tables[0, :num_given_back] = 0
        assert_same_bits(attend(other), attend(world))


@pytest.fixture(scope="module")
def crowd() -> World:
    return make_world(SMOLLM2, [1 + 37 * number % 400 for number in range(32)], seed=9)


@settings(max_examples=30, deadline=None)
@given(order=st.permutations(range(32)), size=st.sampled_from([2, 7, 32]), num_threads=st.integers(1, 5))
def test_a_sequence_has_the_same_bits_alone_and_in_any_batch(
    order: list[int], size: int, num_threads: int, crowd: World
) -> None:
    rows = make_queries(SMOLLM2, 32, seed=10)
    batch = order[:size]
    lengths = [len(crowd.keys[sequence]) for sequence in batch]
    together = decode(crowd, rows[batch], batch, lengths, num_threads)
    for row, sequence in enumerate(batch):
        assert_same_bits(together[row : row + 1], decode(crowd, rows[[sequence]], [sequence], [lengths[row]]))


@pytest.mark.parametrize("num_threads", [2, 3, 7])
def test_several_chunks_on_several_threads_have_the_bits_of_each_alone(num_threads: int, crowd: World) -> None:
    chunks = [(sequence, len(crowd.keys[sequence]) // 3, len(crowd.keys[sequence])) for sequence in (4, 9, 30, 8)]
    ends = np.cumsum([end - start for _, start, end in chunks]).tolist()
    rows = make_queries(SMOLLM2, ends[-1], seed=11)
    together = prefill(crowd, rows, chunks, num_threads)
    for chunk, first, last in zip(chunks, [0, *ends], ends, strict=False):
        assert_same_bits(together[first:last], prefill(crowd, np.ascontiguousarray(rows[first:last]), [chunk]))


@pytest.mark.parametrize("garbage", [0.0, 1e38, np.inf])
def test_what_lies_behind_a_sequences_end_never_matters(garbage: float) -> None:
    world = make_world(SMOLLM2, LENGTHS, seed=12)  # NaN behind the ends
    rows = make_queries(SMOLLM2, 500, seed=13)
    other = World(SMOLLM2, world.pages.copy(), world.block_tables, world.keys, world.values)
    other.pages[np.isnan(bf16_to_float32(other.pages))] = bf16_from(np.array([garbage], np.float32))
    every = range(len(LENGTHS))
    assert_same_bits(decode(world, rows[: len(LENGTHS)], every, LENGTHS), decode(other, rows[:9], every, LENGTHS))
    for sequence, length in enumerate(LENGTHS):
        chunk = [(sequence, 0, length)]
        assert np.isfinite(prefill(world, rows[:length], chunk)).all()
        assert_same_bits(prefill(world, rows[:length], chunk), prefill(other, rows[:length], chunk))


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    world = make_world(SMOLLM2, [300], seed=14)
    rows = make_queries(SMOLLM2, 300, seed=15) * np.float32(1e4)
    expected = attend_in_float64(world, rows, 0, range(1, 301))
    found = prefill(world, rows, [(0, 0, 300)])
    # weights are 0 and 1: a score is known to 1e-2 here, and nearly always some score is ahead by more
    assert np.isfinite(found).all()
    assert np.mean(np.abs(found - expected).max(axis=-1) < 0.05) > 0.99


def test_a_query_that_is_no_number_gives_no_number() -> None:
    world = make_world(SMOLLM2, [200], seed=16)
    rows = make_queries(SMOLLM2, 2, seed=17)
    rows[0, 70] = np.nan
    found = decode(world, rows, [0, 0], [200, 200])
    assert np.isnan(found[0, 1]).all()
    assert np.isfinite(found[0, [0, *range(2, 9)]]).all()
    assert np.isfinite(found[1]).all()


def test_pages_beyond_two_gigabytes_are_found() -> None:
    world = make_world(SMOLLM2, [20], seed=18)
    page_bytes = world.pages[0].nbytes
    num_pages = (5 << 30) // page_bytes
    pages = np.empty((num_pages, *world.pages.shape[1:]), np.uint16)  # memory only where it is written
    tables = np.array([[num_pages - 1, num_pages - 7]], np.int32)
    pages[tables[0]] = world.pages[world.block_tables[0]]
    far = World(SMOLLM2, pages, tables, world.keys, world.values)
    rows = make_queries(SMOLLM2, 1, seed=19)
    assert_same_bits(decode(far, rows, [0], [20]), decode(world, rows, [0], [20]))


def test_a_layer_reads_its_own_part_of_a_page() -> None:
    world = make_world(SMOLLM2, [40], seed=20)
    rows = make_queries(SMOLLM2, 1, seed=21)
    before = decode(world, rows, [0], [40])
    for layer in set(range(NUM_LAYERS)) - {LAYER}:
        world.pages[:, layer] = SEVEN
    assert_same_bits(decode(world, rows, [0], [40]), before)
    world.pages[world.block_tables[0, 1], LAYER, 1, 0, 3 * PAGE_TOKENS] = SEVEN
    assert not np.array_equal(decode(world, rows, [0], [40]), before)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "environment",
    [{"WEIR_CPU_KERNELS": "portable"}, {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}],
    ids=["narrow tiles", "oldest processor"],
)
def test_narrow_tiles_and_the_oldest_processor_give_the_same_bits(environment: dict[str, str]) -> None:
    child = subprocess.run(
        [sys.executable, "-m", "tests.kernels.cpu_attention_cases"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.strip() == digest_of_results()

from dataclasses import replace

import pytest
import torch
from tests.kernels.triton_cases.support import (
    DEVICE,
    DOT_TOLERANCES,
    Cache,
    Heads,
    filled_cache,
    ints,
    normal,
    poisoned,
)

from weir.ops import reference
from weir.ops.gpu.attention import DeviceScoring
from weir.ops.gpu.decode_work import MAX_SPLITS, DecodeTiles, DecodeWork, WorkSize, decode_tiles, decode_work
from weir.ops.gpu.paged_decode import DecodeScratch, decode_scratch, paged_decode

ODD_LENGTHS = [1, 15, 17, 63, 500]
SHAPES = [
    pytest.param(Heads(9, 3, 64), id="9on3x64"),
    pytest.param(Heads(32, 8, 128), id="32on8x128", marks=pytest.mark.long),
    pytest.param(Heads(4, 4, 80), id="4on4x80"),
    pytest.param(Heads(20, 1, 64), id="20on1x64"),
    pytest.param(Heads(4, 2, 256), id="4on2x256"),
    pytest.param(Heads(8, 4, 64, window=20, softcap=2.0), id="8on4x64-window-capped"),
]
# several splits and blocks in few tokens, so that the merge and its own blocks are passed through
SMALL = DecodeTiles(split_tokens=32, block_tokens=16, num_warps=4, num_stages=2, num_programs=3)


def decoded(
    queries: torch.Tensor, cache: Cache, heads: Heads, tiles: DecodeTiles, max_context_tokens: int = 4096
) -> torch.Tensor:
    scratch = scratch_of(len(queries), heads, tiles, max_context_tokens)
    out = poisoned(*queries.shape, dtype=queries.dtype)
    work = decode_work(cache.block_tables, cache.lengths, tiles)
    paged_decode(queries, cache.keys, cache.values, work, heads.scoring, out, scratch, tiles)
    assert not bool(scratch.num_done.any()), "the next launch begins to count from 0"
    return out


def scratch_of(num_rows: int, heads: Heads, tiles: DecodeTiles, max_context_tokens: int = 4096) -> DecodeScratch:
    """What nobody has written is NaN."""
    scratch = decode_scratch(num_rows, heads.num_heads, heads.head_dim, max_context_tokens, tiles, DEVICE)
    scratch.partial.fill_(float("nan"))
    scratch.lse.fill_(float("nan"))
    return scratch


@pytest.mark.parametrize(("dtype", "atol", "rtol"), DOT_TOLERANCES)
@pytest.mark.parametrize("heads", SHAPES)
def test_it_equals_the_reference_whatever_lies_behind_a_sequence(
    heads: Heads, dtype: torch.dtype, atol: float, rtol: float
) -> None:
    torch.manual_seed(42)
    cache = filled_cache(heads, ODD_LENGTHS, dtype)
    queries = normal(len(ODD_LENGTHS), heads.num_heads, heads.head_dim, dtype=dtype)
    out = decoded(queries, cache, heads, decode_tiles(heads.head_dim, dtype))
    expected = reference.paged_decode(
        queries, cache.keys, cache.values, cache.block_tables, cache.lengths, *heads.bounds
    )
    torch.testing.assert_close(out, expected, atol=atol, rtol=rtol)


# of two blocks and cut; of blocks that begin at a split's beginning; and none
@pytest.mark.parametrize(
    ("length", "window"),
    [(31, None), (32, 1), (33, None), (64, 32), (65, 40), (513, None), (700, 95), (700, None)],
)
def test_splits_add_up_at_every_edge(length: int, window: int | None) -> None:
    torch.manual_seed(length)
    heads = Heads(9, 3, 64, window)
    cache = filled_cache(heads, [length, 5], torch.float32)
    queries = normal(2, heads.num_heads, heads.head_dim)
    out = decoded(queries, cache, heads, SMALL)
    expected = reference.paged_decode(
        queries, cache.keys, cache.values, cache.block_tables, cache.lengths, *heads.bounds
    )
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("is_rising", [pytest.param(True, marks=pytest.mark.long), False], ids=["rising", "falling"])
def test_splits_add_up_wherever_the_greatest_scores_are(is_rising: bool) -> None:
    torch.manual_seed(2)
    heads = Heads(9, 3, 64)
    cache = filled_cache(heads, [700], torch.float32)
    queries = normal(1, heads.num_heads, heads.head_dim)
    order = cache.block_tables[0, :44].tolist()
    for index, page in enumerate(order if is_rising else reversed(order)):
        cache.pages[page, :, 0] *= index / 10
    out = decoded(queries, cache, heads, SMALL)
    expected = reference.paged_decode(
        queries, cache.keys, cache.values, cache.block_tables, cache.lengths, *heads.bounds
    )
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("tiles", "window"),
    [(SMALL, 50), (decode_tiles(64, torch.float32), None)],
    ids=["many-splits-and-a-window", "one-split"],
)
def test_a_row_is_the_same_to_the_bit_in_every_batch(tiles: DecodeTiles, window: int | None) -> None:
    torch.manual_seed(7)
    heads = Heads(9, 3, 64, window)
    cache = filled_cache(heads, [300, 1, 17, 129, 64, 700, 33], torch.float32)
    queries = normal(7, heads.num_heads, heads.head_dim)
    together = decoded(queries, cache, heads, tiles)
    for row in range(7):
        width = -(-int(cache.lengths[row]) // 16)
        alone = Cache(cache.pages, cache.block_tables[row : row + 1, :width].contiguous(), cache.lengths[row : row + 1])
        context = max(int(cache.lengths[row]), 1)
        assert torch.equal(decoded(queries[row : row + 1], alone, heads, tiles, context)[0], together[row]), row


def shuffled(work: DecodeWork, order: list[int]) -> DecodeWork:
    count = work.size.max_items
    items = work.items.clone()
    items[: 4 * count] = work.items[: 4 * count].view(count, 4)[order].reshape(-1)
    return replace(work, items=items)


@pytest.mark.parametrize(
    "num_programs", [1, pytest.param(7, marks=pytest.mark.long), 10_000], ids=["one", "seven", "one-an-item"]
)
def test_neither_the_order_in_which_splits_end_nor_who_does_them_changes_a_bit(num_programs: int) -> None:
    torch.manual_seed(23)
    heads = Heads(9, 3, 64)
    cache = filled_cache(heads, [70, 1, 130, 33], torch.float32)
    queries = normal(4, heads.num_heads, heads.head_dim)
    expected = decoded(queries, cache, heads, SMALL)
    work = decode_work(cache.block_tables, cache.lengths, SMALL)
    count = work.size.max_items
    assert count == 3 + 1 + 5 + 2
    scratch = replace(scratch_of(4, heads, SMALL), num_programs=num_programs)
    for order in (list(reversed(range(count))), torch.randperm(count).tolist()):
        out = poisoned(*queries.shape)
        again = shuffled(work, order)
        paged_decode(queries, cache.keys, cache.values, again, heads.scoring, out, scratch, SMALL)
        assert torch.equal(out, expected)
        assert not bool(scratch.num_done.any())


def test_a_launch_for_more_work_than_there_is_does_only_what_there_is() -> None:
    torch.manual_seed(29)
    heads = Heads(4, 2, 64)
    cache = filled_cache(heads, [70, 20], torch.float32)
    queries = normal(3, heads.num_heads, heads.head_dim)
    work = replace(decode_work(cache.block_tables, cache.lengths, SMALL), size=WorkSize(5000, 64))
    out = poisoned(*queries.shape)
    paged_decode(queries, cache.keys, cache.values, work, heads.scoring, out, scratch_of(3, heads, SMALL), SMALL)
    assert torch.equal(out[:2], decoded(queries[:2], cache, heads, SMALL))
    assert bool(out[2].isnan().all()), "a row that the work does not name is left"


@pytest.mark.long
def test_a_row_of_more_than_the_most_splits_has_longer_ones() -> None:
    torch.manual_seed(31)
    heads = Heads(2, 1, 64)
    tiles = replace(SMALL, split_tokens=16)
    lengths = [16 * MAX_SPLITS, 16 * MAX_SPLITS + 1, 2500]
    cache = filled_cache(heads, lengths, torch.float32)
    queries = normal(3, heads.num_heads, heads.head_dim)
    work = decode_work(cache.block_tables, cache.lengths, tiles)
    assert work.size == WorkSize(64 + 33 + 53, 64)
    out = decoded(queries, cache, heads, tiles)
    expected = reference.paged_decode(
        queries, cache.keys, cache.values, cache.block_tables, cache.lengths, *heads.bounds
    )
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
    alone = Cache(cache.pages, cache.block_tables[2:], cache.lengths[2:])
    assert torch.equal(decoded(queries[2:], alone, heads, tiles)[0], out[2])


def test_queries_may_be_part_of_a_wider_row() -> None:
    torch.manual_seed(3)
    heads = Heads(9, 3, 64)
    cache = filled_cache(heads, [40, 70], torch.float32)
    wide = normal(2, 15, 64)
    out = decoded(wide[:, :9], cache, heads, SMALL)
    assert torch.equal(out, decoded(wide[:, :9].contiguous(), cache, heads, SMALL))


def test_a_row_of_no_length_is_zero_and_reads_nothing() -> None:
    torch.manual_seed(5)
    heads = Heads(9, 3, 64)
    cache = filled_cache(heads, [40, 1], torch.float32)
    empty = Cache(cache.pages, cache.block_tables, ints([40, 0]))
    out = decoded(normal(2, 9, 64), empty, heads, SMALL)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert bool(torch.isfinite(out[0]).all())


def test_misfits_are_named() -> None:
    heads = Heads(9, 3, 64)
    cache = filled_cache(heads, [40, 1], torch.float32)
    scratch = decode_scratch(1, 9, 64, 4096, SMALL, DEVICE)
    queries, out = normal(2, 9, 64), poisoned(2, 9, 64)
    work = decode_work(cache.block_tables, cache.lengths, SMALL)

    def launch(queries: torch.Tensor = queries, work: DecodeWork = work) -> None:
        paged_decode(queries, cache.keys, cache.values, work, DeviceScoring(0.125), out, scratch, SMALL)

    with pytest.raises(ValueError, match="room for 1 rows of 64 splits, this batch needs 2"):
        launch()
    with pytest.raises(ValueError, match="10 query heads are no multiple of 3 key heads"):
        launch(queries=normal(2, 10, 64))
    with pytest.raises(ValueError, match=r"queries has shape \[2, 9, 80\], expected \[any, any, 64\]"):
        launch(queries=normal(2, 9, 80))
    with pytest.raises(ValueError, match=r"work.items is torch.int64, expected torch.int32"):
        launch(work=replace(work, items=work.items.long()))
    with pytest.raises(ValueError, match="a row has 97 positions, its table has 6 pages of 16"):
        decode_work(cache.block_tables, ints([97, 1]), SMALL)

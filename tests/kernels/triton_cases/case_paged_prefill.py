import pytest
import torch
from tests.kernels.triton_cases.support import (
    COMPUTE_CAPABILITY,
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
from weir.ops.gpu.paged_prefill import PrefillTiles, paged_prefill, prefill_tiles, tiles_of

SHAPES = [
    pytest.param(Heads(9, 3, 64), id="9on3x64"),
    pytest.param(Heads(16, 4, 128), id="16on4x128"),
    pytest.param(Heads(2, 2, 80), id="2on2x80"),
    pytest.param(Heads(20, 1, 64), id="20on1x64", marks=pytest.mark.long),
    pytest.param(Heads(8, 4, 64, window=20, softcap=2.0), id="8on4x64-window-capped"),
]
SMALL = PrefillTiles(block_rows=16, block_tokens=16, num_warps=4, num_stages=2)


def prefilled(
    queries: torch.Tensor, cache: Cache, chunk_lengths: list[int], heads: Heads, tiles: PrefillTiles | None = None
) -> torch.Tensor:
    """The last `chunk_lengths` positions of each sequence."""
    first_rows = [sum(chunk_lengths[:index]) for index in range(len(chunk_lengths) + 1)]
    tiles = tiles or prefill_tiles(
        heads.num_heads, heads.num_kv_heads, heads.head_dim, queries.dtype, COMPUTE_CAPABILITY
    )
    ends = cache.lengths.tolist()
    tile_list = tiles_of(chunk_lengths, ends, tiles.queries_per_tile(heads.num_heads, heads.num_kv_heads))
    out = poisoned(*queries.shape, dtype=queries.dtype)
    paged_prefill(
        queries,
        cache.keys,
        cache.values,
        cache.block_tables,
        ints(first_rows),
        cache.lengths,
        ints(tile_list),
        heads.scoring,
        out,
        tiles,
    )
    return out


def expected_of(queries: torch.Tensor, cache: Cache, chunk_lengths: list[int], heads: Heads) -> torch.Tensor:
    first_rows = ints([sum(chunk_lengths[:index]) for index in range(len(chunk_lengths) + 1)])
    return reference.paged_prefill(
        queries, cache.keys, cache.values, cache.block_tables, first_rows, cache.lengths, *heads.bounds
    )


@pytest.mark.parametrize(("dtype", "atol", "rtol"), DOT_TOLERANCES)
@pytest.mark.parametrize("heads", SHAPES)
def test_it_equals_the_reference_whatever_lies_behind_a_sequence(
    heads: Heads, dtype: torch.dtype, atol: float, rtol: float
) -> None:
    torch.manual_seed(42)
    ends = [1, 15, 17, 63, 200]
    chunk_lengths = [1, 15, 2, 50, 37]
    cache = filled_cache(heads, ends, dtype)
    queries = normal(sum(chunk_lengths), heads.num_heads, heads.head_dim, dtype=dtype)
    out = prefilled(queries, cache, chunk_lengths, heads)
    torch.testing.assert_close(out, expected_of(queries, cache, chunk_lengths, heads), atol=atol, rtol=rtol)


def test_a_chunk_of_500_positions_passes_through_whole_and_cut_blocks() -> None:
    torch.manual_seed(11)
    heads = Heads(9, 3, 64)
    cache = filled_cache(heads, [500], torch.float16)
    queries = normal(500, 9, 64, dtype=torch.float16)
    out = prefilled(queries, cache, [500], heads)
    torch.testing.assert_close(out, expected_of(queries, cache, [500], heads), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(
    ("tiles", "window"), [(SMALL, 18), (None, None)], ids=["small-tiles-and-a-window", "default-tiles"]
)
@pytest.mark.parametrize(
    "cuts",
    [
        pytest.param([50], marks=pytest.mark.long),
        pytest.param([1, 49], marks=pytest.mark.long),
        [17, 20, 13],
        pytest.param([16, 16, 16, 2], marks=pytest.mark.long),
        [49, 1],
    ],
)
def test_a_position_is_the_same_to_the_bit_however_its_prompt_is_cut(
    cuts: list[int], tiles: PrefillTiles | None, window: int | None
) -> None:
    torch.manual_seed(13)
    heads = Heads(9, 3, 64, window)
    cache = filled_cache(heads, [50, 21], torch.float32)
    queries = normal(71, 9, 64)
    whole = prefilled(queries, cache, [50, 21], heads, tiles)
    done = 0
    for length in cuts:
        part = Cache(cache.pages, cache.block_tables[:1], ints([done + length]))
        out = prefilled(queries[done : done + length], part, [length], heads, tiles)
        assert torch.equal(out, whole[done : done + length]), (done, length)
        done += length


def test_a_sequence_without_rows_is_left_out() -> None:
    torch.manual_seed(17)
    heads = Heads(9, 3, 64)
    cache = filled_cache(heads, [20, 30, 40], torch.float32)
    queries = normal(15, 9, 64)
    chunk_lengths = [5, 0, 10]
    out = prefilled(queries, cache, chunk_lengths, heads, SMALL)
    torch.testing.assert_close(out, expected_of(queries, cache, chunk_lengths, heads), atol=2e-5, rtol=2e-5)


def test_tiles_cover_every_query_once_and_the_longest_come_first() -> None:
    chunk_lengths, ends = [5, 0, 21, 1], [500, 9, 21, 2]
    tiles = tiles_of(chunk_lengths, ends, queries_per_tile=5)
    assert tiles[0] == (0, 0)
    assert sorted(tiles) == [(0, 0), (2, 0), (2, 5), (2, 10), (2, 15), (2, 20), (3, 0)]
    seen = [ends[sequence] - chunk_lengths[sequence] + first for sequence, first in tiles]
    assert seen == sorted(seen, reverse=True)


def test_misfits_are_named() -> None:
    heads = Heads(9, 3, 64)
    cache = filled_cache(heads, [40], torch.float32)
    queries, out = normal(4, 9, 64), poisoned(4, 9, 64)
    tiles = ints([[0, 0]])

    def launch(out: torch.Tensor = out, first_rows: torch.Tensor | None = None) -> None:
        rows = ints([0, 4]) if first_rows is None else first_rows
        paged_prefill(
            queries,
            cache.keys,
            cache.values,
            cache.block_tables,
            rows,
            cache.lengths,
            tiles,
            DeviceScoring(0.125),
            out,
            SMALL,
        )

    with pytest.raises(ValueError, match=r"first_rows has shape \[3\], expected \[2\]"):
        launch(first_rows=ints([0, 2, 4]))
    with pytest.raises(ValueError, match=r"out has shape \[4, 9, 32\], expected \[4, 9, 64\]"):
        launch(out=poisoned(4, 9, 32))

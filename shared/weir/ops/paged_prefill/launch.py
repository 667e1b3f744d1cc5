"""Launches paged prefill attention on a GPU (or in Triton's interpreter)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton

from weir.kv.geometry import PAGE_TOKENS
from weir.ops.checks import check_dtype, check_kv_pages, check_rows, check_shape, query_heads_per_kv_head
from weir.ops.paged_decode.launch import LOG2_E
from weir.ops.paged_prefill.kernel import paged_prefill_kernel


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """How the work is cut: functions of the model's shape and type, never of the batch (see DecodeTiles)."""

    block_rows: int
    block_tokens: int
    num_warps: int
    num_stages: int

    def queries_per_tile(self, num_heads: int, num_kv_heads: int) -> int:
        """A tile's rows are queries x the query heads of one key head."""
        return self.block_rows // (num_heads // num_kv_heads)


def prefill_tiles(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, compute_capability: int
) -> PrefillTiles:
    """`compute_capability` is 80, 90, 100: how many registers a tile costs depends on the matrix instructions."""
    block_rows, block_tokens, num_warps, num_stages = 128, 64, 8, 3
    if dtype == torch.float32:
        block_rows, block_tokens, num_warps, num_stages = 32, 32, 4, 2
    elif head_dim > 128:
        block_rows, block_tokens = 64, 32
    elif head_dim > 64 and compute_capability < 90:
        block_tokens = 32
    group = num_heads // num_kv_heads
    return PrefillTiles(max(block_rows, triton.next_power_of_2(group)), block_tokens, num_warps, num_stages)


def tiles_of(chunk_lengths: Sequence[int], ends: Sequence[int], queries_per_tile: int) -> list[tuple[int, int]]:
    """(sequence, first query of its chunk) of each tile, those that see most first: the last to start are short."""
    tiles = [
        (sequence, first)
        for sequence, num_queries in enumerate(chunk_lengths)
        for first in range(0, num_queries, queries_per_tile)
    ]
    return sorted(tiles, key=lambda tile: chunk_lengths[tile[0]] - ends[tile[0]] - tile[1])


def paged_prefill(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    first_rows: torch.Tensor,
    ends: torch.Tensor,
    tile_list: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    tiles: PrefillTiles,
) -> None:
    """Writes `out` [rows, heads, head_dim]; shapes and meaning as `reference.paged_prefill`.

    All index tensors are int32; `tile_list` [tiles, 2] comes from `tiles_of`. Ends must not pass the tables' width:
    they live on the device and are not checked. A position's result depends on its own sequence only, and not on how
    the sequence was cut into chunks.

    Raises:
        ValueError: a shape, type or stride does not fit.
    """
    group = query_heads_per_kv_head(queries, keys)
    check_kv_pages(keys, values)
    num_kv_heads, head_dim = keys.shape[1], keys.shape[3]
    check_shape("out", out, queries.shape)
    check_rows("out", out)
    num_sequences = block_tables.shape[0]
    check_shape("block_tables", block_tables, (num_sequences, None))
    check_rows("block_tables", block_tables)
    check_shape("first_rows", first_rows, (num_sequences + 1,))
    check_shape("ends", ends, (num_sequences,))
    check_shape("tile_list", tile_list, (None, 2))
    for name, index in (("block_tables", block_tables), ("first_rows", first_rows), ("ends", ends)):
        check_dtype(name, index, torch.int32)
    check_dtype("tile_list", tile_list, torch.int32)
    if not tile_list.is_contiguous():
        raise ValueError("tile_list must be contiguous")
    if tile_list.shape[0] == 0:
        return
    paged_prefill_kernel[num_kv_heads, tile_list.shape[0]](
        queries,
        keys,
        values,
        block_tables,
        first_rows,
        ends,
        tile_list,
        out,
        scale * LOG2_E,
        queries.stride(0),
        queries.stride(1),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        block_tables.stride(0),
        out.stride(0),
        out.stride(1),
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_M=tiles.block_rows,
        BLOCK_N=tiles.block_tokens,
        PAGE=PAGE_TOKENS,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=False,
    )

"""How decode attention is cut: the list of splits of rows that `paged_decode` goes through, made on the host."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton

from weir.kv.geometry import PAGE_TOKENS
from weir.ops.gpu.checks import check_shape

Ints = npt.NDArray[np.int32]

MAX_SPLITS = 64
"""Of a row: those of longer ones are longer."""
ITEM_INTS = 4


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """How the work is cut. `split_tokens` and `block_tokens` set the order of additions, so results depend on them to
    the last bit: they are functions of the model's shape and type, never of the batch. A row longer than MAX_SPLITS
    splits has MAX_SPLITS of a multiple of `split_tokens`, by its own length.

    `num_programs`: of a multiprocessor. Results do not depend on it.
    """

    split_tokens: int
    block_tokens: int
    num_warps: int
    num_stages: int
    num_programs: int


@dataclass(frozen=True, slots=True)
class WorkSize:
    """At most: items of a batch, and splits of one row."""

    max_items: int
    max_splits: int


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """`items` int32 [any]: first four ints an item (row, split, place of the row's table in `items`, length), behind
    them the tables. `num_items` int32 [1] is on the device as well."""

    items: torch.Tensor
    num_items: torch.Tensor
    size: WorkSize


def decode_tiles(head_dim: int, dtype: torch.dtype) -> DecodeTiles:
    """Many programs of few warps, so that a multiprocessor has enough bytes in flight to hide memory latency. Triton's
    pipeliner halves the stages of a load whose address comes from another load, as a page's does: 5 stages read 2
    blocks ahead, 3 and 4 only 1.

    Up to 128 elements, what an H200 was fastest with (ADR 105); fp32 and wider heads take blocks of 32 KiB, as they are
    multiplied.
    """
    width, is_int8 = triton.next_power_of_2(head_dim), dtype is torch.int8
    if width > 128 or dtype is torch.float32:
        block_tokens = min(128, 16384 // (width * (2 if is_int8 else dtype.itemsize)))
        return DecodeTiles(256, block_tokens, num_warps=4, num_stages=9 if is_int8 else 5, num_programs=3)
    if is_int8:
        return DecodeTiles(256, block_tokens=min(128, 8192 // width), num_warps=2, num_stages=5, num_programs=8)
    is_narrow = width <= 64
    return DecodeTiles(
        256, block_tokens=32, num_warps=1, num_stages=7 if is_narrow else 5, num_programs=8 if is_narrow else 6
    )


def most_splits(max_context_tokens: int, tiles: DecodeTiles) -> int:
    """Of a row of at most so many positions."""
    return min(MAX_SPLITS, max(1, -(-max_context_tokens // tiles.split_tokens)))


def decode_items(lengths: Ints, table_places: Ints, tiles: DecodeTiles) -> Ints:
    """The list of `DecodeWork` [items, 4] on the host, without tables; `table_places` are added to its own size.

    The last rows come first: where those are the longest, no program is left with a long piece at the end.
    """
    split_tokens = tiles.split_tokens * np.maximum(1, -(-lengths // (tiles.split_tokens * MAX_SPLITS)))
    counts = np.maximum(1, -(-lengths // split_tokens))[::-1]
    rows = np.repeat(np.arange(len(lengths) - 1, -1, -1), counts)
    splits = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    places = table_places[rows] + ITEM_INTS * len(rows)
    items: Ints = np.stack([rows, splits, places, lengths[rows]], axis=1).astype(np.int32)
    return items


def decode_work(block_tables: torch.Tensor, lengths: torch.Tensor, tiles: DecodeTiles) -> DecodeWork:
    """Of `block_tables` [rows, width] and `lengths` [rows], on the device, by way of the host.

    Raises ValueError for a shape that does not fit, or a length that passes the table.
    """
    num_rows, width = block_tables.shape
    check_shape("lengths", lengths, (num_rows,))
    ends = lengths.cpu().numpy().astype(np.int32)
    if num_rows and ends.max() > width * PAGE_TOKENS:
        raise ValueError(f"a row has {ends.max()} positions, its table has {width} pages of {PAGE_TOKENS}")
    items = decode_items(ends, np.arange(num_rows, dtype=np.int32) * width, tiles)
    flat = np.concatenate([items.reshape(-1), block_tables.cpu().numpy().astype(np.int32).reshape(-1)])
    device = block_tables.device
    return DecodeWork(
        torch.from_numpy(flat).to(device),
        torch.tensor([len(items)], dtype=torch.int32, device=device),
        WorkSize(len(items), int(items[:, 1].max(initial=0)) + 1),
    )

"""Split-KV flash decoding (Dao, Haziza, Massa, Sizov: "Flash-Decoding for long-context inference", 2023) over pages.

The query heads that share a key head are the rows of one tile, so that its keys and values are read once. Work is a
list on the device of splits of rows, which a fixed number of programs goes through: what is launched does not depend on
how long the longest row is. The program that ends a row's last split adds the splits up, in their order and not in that
of their ends.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from weir.kv.geometry import PAGE_TOKENS
from weir.ops.gpu.attention import LOG2_E, attend_block, load_page_rows, query_heads_per_kv_head
from weir.ops.gpu.checks import check_dtype, check_kv_pages, check_rows, check_shape

Ints = npt.NDArray[np.int32]

MAX_SPLITS = 64
"""Of a row: those of longer ones are longer."""
_MIN_DOT_ROWS = 16
_MERGE_ELEMENTS = 4096
_PROGRAMS_PER_MULTIPROCESSOR = 3
"""As many as run side by side on sm_90 by their shared memory. Results do not depend on it."""
_PROGRAMS_WITHOUT_GPU = 64
ITEM_INTS = 4


@triton.jit
def merge_splits(
    p_partial,
    p_lse,
    first_split,
    num_splits,
    p_out,
    stride_out_head,
    max_splits,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Adds up the splits of GROUP heads in their order, BLOCK_S at a time, whatever `max_splits` is.

    Other programs have written them meanwhile: they are read from the cache that all share.
    """
    o_g = tl.arange(0, BLOCK_G)
    o_d = tl.arange(0, BLOCK_D)
    m_g = o_g < GROUP
    m_d = o_d < HEAD_DIM
    b_max = tl.full([BLOCK_G], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_G], tl.float32)
    b_acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for first in range(0, num_splits, BLOCK_S):
        o_s = first + tl.arange(0, BLOCK_S)
        m_s = o_s < num_splits
        m_sg = m_s[:, None] & m_g[None, :]
        o_sg = first_split + o_g[None, :] * max_splits + o_s[:, None]  # [BLOCK_S, BLOCK_G]
        b_lse = tl.load(p_lse + o_sg, mask=m_sg, other=0.0, cache_modifier=".cg")
        b_lse = tl.where(m_s[:, None], b_lse, float("-inf"))
        p_rows = p_partial + o_sg[:, :, None] * HEAD_DIM + o_d[None, None, :]
        b_rows = tl.load(p_rows, mask=m_sg[:, :, None] & m_d[None, None, :], other=0.0, cache_modifier=".cg")
        b_new_max = tl.maximum(b_max, tl.max(b_lse, 0))
        b_weight = tl.exp2(b_lse - b_new_max[None, :])
        b_decay = tl.exp2(b_max - b_new_max)
        b_sum = tl.fma(b_sum, b_decay, tl.sum(b_weight, 0))
        b_acc = b_acc * b_decay[:, None] + tl.sum(b_weight[:, :, None] * b_rows, 0)
        b_max = b_new_max
    p_o = p_out + o_g[:, None] * stride_out_head + o_d[None, :]
    tl.store(p_o, (b_acc / b_sum[:, None]).to(p_out.dtype.element_ty), mask=m_g[:, None] & m_d[None, :])


@triton.jit
def attend_split(
    b_q,
    p_keys,
    p_values,
    p_table,
    start,
    end,
    scale_log2,
    stride_page,
    stride_token,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Of positions [start, end): the result [BLOCK_M, BLOCK_D] and the base-2 logarithm of the sum of exponentials
    [BLOCK_M]. Of no position it is 0."""
    o_n = tl.arange(0, BLOCK_N)
    b_max = tl.full([b_q.shape[0]], float("-inf"), tl.float32)
    b_sum = tl.zeros([b_q.shape[0]], tl.float32)
    b_acc = tl.zeros([b_q.shape[0], BLOCK_D], tl.float32)
    for first in range(start, end, BLOCK_N):
        o_t = first + o_n
        m_n = o_t < end
        b_k = load_page_rows(p_keys, p_table, o_t, m_n, stride_page, stride_token, HEAD_DIM, BLOCK_D, PAGE, True)
        b_v = load_page_rows(p_values, p_table, o_t, m_n, stride_page, stride_token, HEAD_DIM, BLOCK_D, PAGE, True)
        b_max, b_sum, b_acc = attend_block(b_q, b_k, b_v, b_max, b_sum, b_acc, m_n[None, :], scale_log2, True)
    b_sum = tl.where(b_sum > 0, b_sum, 1.0)
    return b_acc / b_sum[:, None], tl.fma(b_max, scale_log2, tl.log2(b_sum))


@triton.jit
def paged_decode_kernel(
    p_queries,
    p_keys,
    p_values,
    p_work,
    p_num_items,
    p_out,
    p_partial,
    p_lse,
    p_num_done,
    scale_log2,
    stride_query_row,
    stride_query_head,
    stride_page,
    stride_kv_head,
    stride_token,
    stride_out_row,
    stride_out_head,
    max_splits,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Program (number) takes each num_programs-th pair of a key head and an item: row, split, place of the row's table,
    its length.

    It attends to the positions of that split. A row of one split is finished here. Of more, each split leaves its
    result and the base-2 logarithm of its sum of exponentials: partial [rows, heads, max_splits, HEAD_DIM], lse [rows,
    heads, max_splits], both fp32. Whoever finds that all others of the row are there adds them up.
    """
    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    for i_pair in range(tl.program_id(0), tl.load(p_num_items) * NUM_KV_HEADS, tl.num_programs(0)):
        i_item = i_pair // NUM_KV_HEADS
        i_kv_head = i_pair % NUM_KV_HEADS
        o_head = i_kv_head * GROUP + o_m
        m_head = o_head < (i_kv_head + 1) * GROUP
        m_q = m_head[:, None] & (o_d < HEAD_DIM)[None, :]
        p_k = p_keys + i_kv_head * stride_kv_head
        p_v = p_values + i_kv_head * stride_kv_head
        i_row = tl.load(p_work + 4 * i_item).to(tl.int64)
        i_split = tl.load(p_work + 4 * i_item + 1)
        p_table = p_work + tl.load(p_work + 4 * i_item + 2)
        length = tl.load(p_work + 4 * i_item + 3)
        split_tokens = SPLIT * tl.cdiv(length, SPLIT * MAX_SPLITS)
        start = i_split * split_tokens
        end = tl.minimum(start + split_tokens, length)
        p_q = p_queries + i_row * stride_query_row + o_head[:, None] * stride_query_head + o_d[None, :]
        b_q = tl.load(p_q, mask=m_q, other=0.0)  # [BLOCK_M, BLOCK_D]
        b_out, b_lse = attend_split(
            b_q, p_k, p_v, p_table, start, end, scale_log2, stride_page, stride_token, BLOCK_N, HEAD_DIM, BLOCK_D, PAGE
        )
        p_row_out = p_out + i_row * stride_out_row
        if length <= split_tokens:
            p_o = p_row_out + o_head[:, None] * stride_out_head + o_d[None, :]
            tl.store(p_o, b_out.to(p_out.dtype.element_ty), mask=m_q)
        else:
            o_split = (i_row * NUM_KV_HEADS * GROUP + o_head) * max_splits + i_split  # [BLOCK_M]
            tl.store(p_partial + o_split[:, None] * HEAD_DIM + o_d[None, :], b_out, mask=m_q)
            tl.store(p_lse + o_split, b_lse, mask=m_head)
            num_splits = tl.cdiv(length, split_tokens)
            p_done = p_num_done + i_row * NUM_KV_HEADS + i_kv_head
            tl.debug_barrier()  # all threads have written before one of them says so
            if tl.atomic_add(p_done, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
                first_split = (i_row * NUM_KV_HEADS + i_kv_head) * GROUP * max_splits
                p_merged = p_row_out + i_kv_head * GROUP * stride_out_head
                merge_splits(
                    p_partial, p_lse, first_split, num_splits, p_merged, stride_out_head, max_splits, GROUP, HEAD_DIM,
                    BLOCK_D, BLOCK_G, BLOCK_S
                )  # fmt: skip
                tl.store(p_done, 0)  # for the next launch, which may be the same graph again


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """How the work is cut. `split_tokens` and `block_tokens` set the order of additions, so results depend on them to
    the last bit: they are functions of the model's shape and type, never of the batch. A row longer than MAX_SPLITS
    splits has MAX_SPLITS of a multiple of `split_tokens`, by its own length."""

    split_tokens: int
    block_tokens: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class DecodeScratch:
    """Room for the splits' results, reused by every layer and step: `partial` [rows, heads, splits, head_dim] and
    `lse` [rows, heads, splits], fp32. `num_done` int32 is 0 between launches. `num_programs`: of a launch, at most."""

    partial: torch.Tensor
    lse: torch.Tensor
    num_done: torch.Tensor
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
    """A block is 32 KiB of keys and values, read two blocks ahead, so that a few programs on a multiprocessor keep
    enough bytes in flight to hide memory latency. Triton's pipeliner halves the stages of a load whose address comes
    from another load, as a page's does: 5 stages read 2 blocks ahead, 3 and 4 only 1.
    """
    block_tokens = min(128, 16384 // (triton.next_power_of_2(head_dim) * dtype.itemsize))
    return DecodeTiles(split_tokens=256, block_tokens=block_tokens, num_warps=4, num_stages=5)


def most_splits(max_context_tokens: int, tiles: DecodeTiles) -> int:
    """Of a row of at most so many positions."""
    return min(MAX_SPLITS, max(1, -(-max_context_tokens // tiles.split_tokens)))


def decode_scratch(
    max_rows: int, num_heads: int, head_dim: int, max_context_tokens: int, tiles: DecodeTiles, device: torch.device
) -> DecodeScratch:
    """Scratch for batches of up to `max_rows` rows of up to `max_context_tokens` positions."""
    splits = most_splits(max_context_tokens, tiles)
    num_programs = _PROGRAMS_WITHOUT_GPU
    if device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        num_programs = _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors
    return DecodeScratch(
        torch.empty(max_rows, num_heads, splits, head_dim, dtype=torch.float32, device=device),
        torch.empty(max_rows, num_heads, splits, dtype=torch.float32, device=device),
        torch.zeros(max_rows * num_heads, dtype=torch.int32, device=device),
        num_programs,
    )


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


def paged_decode(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    work: DecodeWork,
    scale: float,
    out: torch.Tensor,
    scratch: DecodeScratch,
    tiles: DecodeTiles,
) -> None:
    """Writes the rows of `out` [rows, heads, head_dim] that `work` names; shapes and meaning as
    `reference.paged_decode`.

    What is in `work` lives on the device and is not checked. A row's result depends on its own query, pages and length
    only: not on the order of the work, nor on who does it.

    Raises:
        ValueError: a shape, type or stride does not fit, or the scratch is too small.
    """
    group = query_heads_per_kv_head(queries, keys)
    check_kv_pages(keys, values)
    check_shape("out", out, queries.shape)
    check_rows("out", out)
    check_shape("work.items", work.items, (None,))
    check_shape("work.num_items", work.num_items, (1,))
    for name, tensor in (("work.items", work.items), ("work.num_items", work.num_items)):
        check_dtype(name, tensor, torch.int32)
    num_kv_heads, head_dim = keys.shape[1], keys.shape[3]
    _check_scratch(scratch, queries, work.size.max_splits)
    if work.size.max_items == 0:
        return
    block_d, block_g = triton.next_power_of_2(head_dim), triton.next_power_of_2(group)
    num_programs = min(work.size.max_items * num_kv_heads, scratch.num_programs)
    paged_decode_kernel[num_programs,](
        queries,
        keys,
        values,
        work.items,
        work.num_items,
        out,
        scratch.partial,
        scratch.lse,
        scratch.num_done,
        scale * LOG2_E,
        queries.stride(0),
        queries.stride(1),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        out.stride(0),
        out.stride(1),
        scratch.lse.shape[2],
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_M=max(_MIN_DOT_ROWS, block_g),
        BLOCK_N=tiles.block_tokens,
        BLOCK_G=block_g,
        BLOCK_S=min(16, max(1, _MERGE_ELEMENTS // (block_g * block_d))),
        SPLIT=tiles.split_tokens,
        MAX_SPLITS=MAX_SPLITS,
        PAGE=PAGE_TOKENS,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=False,
        # two programs a multiprocessor: the assembler aims at three, and spills for it
        **({} if head_dim <= 128 else {"maxnreg": 224}),
    )


def _check_scratch(scratch: DecodeScratch, queries: torch.Tensor, num_splits: int) -> None:
    num_rows, num_heads, head_dim = queries.shape
    check_shape("scratch.lse", scratch.lse, (None, num_heads, None))
    max_rows, _, max_splits = scratch.lse.shape
    check_shape("scratch.partial", scratch.partial, (max_rows, num_heads, max_splits, head_dim))
    check_shape("scratch.num_done", scratch.num_done, (max_rows * num_heads,))
    check_dtype("scratch.partial", scratch.partial, torch.float32)
    check_dtype("scratch.lse", scratch.lse, torch.float32)
    check_dtype("scratch.num_done", scratch.num_done, torch.int32)
    if not (scratch.partial.is_contiguous() and scratch.lse.is_contiguous()):
        raise ValueError("the scratch of paged decode must be contiguous")
    if max_rows < num_rows or max_splits < num_splits:
        raise ValueError(
            f"the scratch has room for {max_rows} rows of {max_splits} splits, this batch needs {num_rows} of "
            f"{num_splits}: make it with decode_scratch() for the largest batch and context"
        )

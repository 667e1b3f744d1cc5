"""A step's plan as the index arrays that the Triton kernels read.

Rows of the flat batch, in order:

    | decode rows: one token a sequence | prompt chunk | prompt chunk | ...

A prompt's chunk goes to the prefill kernel even if it is one token long: a position's keys and values must not depend
on how its prompt was cut, and the two kernels add in different orders.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from weir.core.errors import InternalError
from weir.engine.plan import SAMPLED_BEFORE, ChunkPlan, StepPlan
from weir.kv.geometry import PAGE_TOKENS, num_pages_for
from weir.model.rows import SampledRow, ScoredRows, ordered_chunks, rows_with_logits, whole
from weir.model.triton.memory import HostArray, StepUpload
from weir.model.triton.tables import Ints, TableRows, flat_tables, num_pages_of
from weir.ops.gpu.decode_work import ITEM_INTS, MAX_SPLITS, DecodeTiles, DecodeWork, WorkSize, decode_items
from weir.ops.gpu.paged_prefill import tiles_of

_new = tuple.__new__  # of named tuples: their own constructors look at keywords first


SCORED_ROWS = 64
"""Of a prompt, whose logits are there at a time: all of them may be gigabytes."""
MAX_PADDED_PROMPTS = 16
"""Of a step that is filled up: it uploads a table of the longest context for each."""


@dataclass(frozen=True, slots=True)
class TritonLimits:
    """What the buffers have room for: tokens of one step, and its sequences."""

    max_rows: int
    max_sequences: int
    max_context_tokens: int

    @property
    def max_logit_rows(self) -> int:
        """Of one pass to the logits; a prompt that is scored takes several."""
        return max(self.max_sequences, SCORED_ROWS)

    @property
    def upload_bytes(self) -> int:
        """An upper bound of what `device_batch` and those that fill up send."""
        pages = self.max_sequences * num_pages_for(self.max_context_tokens)
        items = self.max_sequences * MAX_SPLITS
        padded = (MAX_PADDED_PROMPTS + 1) * (num_pages_for(self.max_context_tokens) + 4)
        return 4 * (5 * self.max_rows + pages + ITEM_INTS * items + padded) + 16 * self.max_sequences + 1024


@dataclass(frozen=True, slots=True)
class DecodeIndex:
    """Rows [0, num_rows) of the flat batch."""

    num_rows: int
    work: DecodeWork


@dataclass(frozen=True, slots=True)
class PrefillIndex:
    """As `weir.ops.gpu.paged_prefill` wants it, of rows of the whole flat batch."""

    block_tables: torch.Tensor
    first_rows: torch.Tensor
    ends: torch.Tensor
    tile_list: torch.Tensor


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """On the device: `token_ids`, `positions`, `slot_mapping` int32 [rows], who attends to what, and the numbers of the
    rows whose logits are wanted (int32).

    `slot_mapping` says where a row's key and value go (`weir.ops.reference`); a request's slot is something else.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    decode: DecodeIndex | None
    prefill: PrefillIndex | None
    sampled_rows: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The decodes of a step in the order of the flat batch: shortest context first. All of the token ids are
    `SAMPLED_BEFORE`, or none."""

    chunks: tuple[ChunkPlan, ...]
    token_ids: Ints
    positions: Ints
    page_ids: Ints
    """Those of `TableRows`: table i is row `table_rows[i]`. Valid until the next step."""
    table_rows: npt.NDArray[np.intp]

    def __len__(self) -> int:
        return len(self.chunks)

    @property
    def ends(self) -> Ints:
        return self.positions + np.int32(1)

    @property
    def slot_mapping(self) -> Ints:
        pages = self.page_ids[self.table_rows, self.positions // PAGE_TOKENS]
        slot_mapping: Ints = pages * PAGE_TOKENS + self.positions % PAGE_TOKENS
        return slot_mapping

    @property
    def num_pages(self) -> Ints:
        return num_pages_of(self.ends)


_NO_INTS = np.empty(0, np.int32)
NO_DECODES = DecodeRows((), _NO_INTS, _NO_INTS, _NO_INTS.reshape(0, 0), np.empty(0, np.intp))


@dataclass(frozen=True, slots=True)
class HostBatch:
    """The plan's chunks in the order of the flat batch."""

    decodes: DecodeRows
    prefills: tuple[ChunkPlan, ...]
    sampled: tuple[SampledRow, ...]
    scored: tuple[ScoredRows, ...]

    @property
    def num_rows(self) -> int:
        return len(self.decodes) + sum(len(chunk.token_ids) for chunk in self.prefills)


@dataclass(frozen=True, slots=True)
class MixedSize:
    """What a step of prompts and decodes is filled up to: its rows, and the most of decodes, prompts, and pages of a
    prompt's table."""

    num_rows: int
    max_decodes: int
    max_prompts: int
    max_pages: int

    @classmethod
    def of(cls, num_rows: int, limits: TritonLimits) -> "MixedSize":
        max_decodes, max_prompts = min(limits.max_sequences, num_rows), min(limits.max_sequences, MAX_PADDED_PROMPTS)
        return cls(num_rows, max_decodes, max_prompts, num_pages_for(limits.max_context_tokens))


EMPTY_BATCH = HostBatch(NO_DECODES, (), (), ())


class BatchMaker:
    """Makes the batches of a runner's steps. What a step has in common with the one before is not made again."""

    def __init__(self, num_pages: int, vocab_size: int, limits: TritonLimits) -> None:
        self._num_pages = num_pages
        self._vocab_size = vocab_size
        self._limits = limits
        self._tables = TableRows(limits.max_sequences, num_pages_for(limits.max_context_tokens), num_pages)

    def make(self, plan: StepPlan) -> HostBatch:
        """Raises InternalError if the plan would read or write where it must not, or is too large."""
        if len({chunk.slot for chunk in plan.chunks}) < len(plan.chunks):
            self._ordered(plan.chunks)  # raises
        decodes: list[ChunkPlan] = []
        others: list[ChunkPlan] = []
        for chunk in plan.chunks:
            (decodes if _is_decode(chunk) else others).append(chunk)
        short, long = self._ordered(others) if others else ([], [])
        prefills = (*short, *long)
        self._check_size(len(decodes) + sum(len(chunk.token_ids) for chunk in prefills), len(plan.chunks))
        rows = self._decode_rows(decodes) if decodes else NO_DECODES
        sampled = [_new(SampledRow, (chunk.slot, row, chunk.sample)) for row, chunk in enumerate(rows.chunks)]
        if not prefills:
            return HostBatch(rows, (), tuple(sampled), ())
        more_sampled, scored = rows_with_logits(whole(prefills), first_row=len(rows))
        return HostBatch(rows, prefills, (*sampled, *more_sampled), scored)

    def _decode_rows(self, chunks: list[ChunkPlan]) -> DecodeRows:
        starts = np.array([chunk.start for chunk in chunks], np.int64)
        order = np.argsort(starts, kind="stable")
        ordered = [chunks[place] for place in order.tolist()]
        starts = starts[order]
        token_ids = np.array([chunk.token_ids[0] for chunk in ordered], np.int64)
        lengths = np.array([len(chunk.block_table) for chunk in ordered], np.int64)
        fits = (
            (starts >= 0).all()
            and starts[-1] < self._limits.max_context_tokens
            and (lengths * PAGE_TOKENS > starts).all()
            and ((token_ids >= 0).all() or (token_ids == SAMPLED_BEFORE).all())
            and (token_ids < self._vocab_size).all()
        )
        table_rows = self._tables.try_rows_of(ordered) if fits else None
        if table_rows is None:
            self._ordered(chunks)  # raises, and says what is wrong
            raise InternalError("step plan: a decode that the general check finds nothing wrong with was refused")
        return DecodeRows(
            tuple(ordered),
            token_ids.astype(np.int32),
            starts.astype(np.int32),
            self._tables.page_ids,
            np.array(table_rows, np.intp),
        )

    def _ordered(self, chunks: Sequence[ChunkPlan]) -> tuple[list[ChunkPlan], list[ChunkPlan]]:
        plan = StepPlan(0, tuple(chunks))
        return ordered_chunks(plan, self._num_pages, self._vocab_size, self._limits.max_context_tokens)

    def _check_size(self, num_tokens: int, num_sequences: int) -> None:
        if num_tokens > self._limits.max_rows or num_sequences > self._limits.max_sequences:
            raise InternalError(
                f"step plan: {num_tokens} tokens of {num_sequences} sequences, the runner has room for "
                f"{self._limits.max_rows} of {self._limits.max_sequences}"
            )


def _is_decode(chunk: ChunkPlan) -> bool:
    """Of chunks of one token: the next of an output, not the last of a prompt."""
    return len(chunk.token_ids) == 1 and chunk.sample is not None and chunk.sample.output_index > 0


def device_batch(batch: HostBatch, upload: StepUpload, queries_per_tile: int, tiles: DecodeTiles) -> DeviceBatch:
    """One copy to the device; the views are valid until the next."""
    decodes = batch.decodes
    work = _decode_work(decodes, tiles) if decodes else None
    arrays = [
        *_row_arrays(batch),
        *((work.num_items, work.items) if work is not None else ()),
        *(_prefill_arrays(batch, queries_per_tile) if batch.prefills else ()),
        *((_sampled_rows(batch),) if batch.sampled else ()),
    ]
    views = iter(upload.send(arrays))
    token_ids, positions, slot_mapping = next(views), next(views), next(views)
    return DeviceBatch(
        token_ids,
        positions,
        slot_mapping,
        DecodeIndex(len(decodes), work.sent(next(views), next(views))) if work is not None else None,
        PrefillIndex(next(views), next(views), next(views), next(views)) if batch.prefills else None,
        next(views) if batch.sampled else None,
    )


def padded_decodes(
    batch: HostBatch, num_rows: int, upload: StepUpload, tiles: DecodeTiles, most: WorkSize
) -> DeviceBatch:
    """As `device_batch`, for a batch of decodes alone, filled up to `num_rows` rows. `most`: of any such batch.

    Batches of so many rows lie at the same addresses, however long their sequences are: what varies in size comes last.
    A row that fills up writes to no page (its slot mapping is -1) and attends to nothing; its logits mean nothing.
    """
    work = _decode_work(batch.decodes, tiles)
    rows = np.arange(num_rows, dtype=np.int32)
    views = upload.send([*_padded_rows(batch, num_rows), rows, work.num_items, work.items])
    token_ids, positions, slot_mapping, sampled_rows, num_items, items = views
    index = DecodeIndex(num_rows, replace(work, size=most).sent(num_items, items))
    return DeviceBatch(token_ids, positions, slot_mapping, index, None, sampled_rows)


def padded_mixed(
    batch: HostBatch,
    size: MixedSize,
    upload: StepUpload,
    queries_per_tile: int,
    tiles: DecodeTiles,
    most: WorkSize,
) -> DeviceBatch:
    """As `padded_decodes`, for a batch with prompts; `most` is of `size.max_decodes`. Sampled rows are those of the
    batch, and lie anywhere.

    There is a sequence more than prompts, without rows: what fills up the tiles belongs to it.
    """
    work = _decode_work(batch.decodes, tiles)
    num_tiles = size.num_rows // queries_per_tile + size.max_prompts
    tables, first_rows, ends, tile_list = _prefill_arrays(batch, queries_per_tile)
    arrays: list[HostArray] = [
        *_padded_rows(batch, size.num_rows),
        _padded(tables, (size.max_prompts + 1, size.max_pages), 0),
        _padded(first_rows, (size.max_prompts + 2,), batch.num_rows),
        _padded(ends, (size.max_prompts + 1,), 0),
        _padded(tile_list, (num_tiles, 2), (size.max_prompts, 0)),
        *(work.num_items, work.items, _sampled_rows(batch)),
    ]
    views = iter(upload.send(arrays))
    token_ids, positions, slot_mapping = next(views), next(views), next(views)
    prefill = PrefillIndex(next(views), next(views), next(views), next(views))
    decode = DecodeIndex(size.max_decodes, replace(work, size=most).sent(next(views), next(views)))
    return DeviceBatch(token_ids, positions, slot_mapping, decode, prefill, next(views) if batch.sampled else None)


def _padded_rows(batch: HostBatch, num_rows: int) -> list[HostArray]:
    """Token ids, positions and slot mapping."""
    token_ids, positions, slot_mapping = _row_arrays(batch)
    return [
        _padded(token_ids, (num_rows,), 0),
        _padded(positions, (num_rows,), 0),
        _padded(slot_mapping, (num_rows,), -1),
    ]


def _padded(array: Ints, shape: tuple[int, ...], fill: int | tuple[int, ...]) -> Ints:
    """With `fill` behind what is there, in every direction."""
    padded: Ints = np.full(shape, fill, np.int32)
    padded[tuple(slice(length) for length in array.shape)] = array
    return padded


def _sampled_rows(batch: HostBatch) -> Ints:
    return np.array([row.row for row in batch.sampled], np.int32)


@dataclass(frozen=True, slots=True)
class _HostWork:
    """`DecodeWork` before it is sent."""

    items: Ints
    num_items: Ints
    size: WorkSize

    def sent(self, num_items: torch.Tensor, items: torch.Tensor) -> DecodeWork:
        return DecodeWork(items, num_items, self.size)


def _row_arrays(batch: HostBatch) -> tuple[Ints, Ints, Ints]:
    """Token ids, positions and slot mapping."""
    decodes, prefills = batch.decodes, batch.prefills
    if not prefills:
        return decodes.token_ids, decodes.positions, decodes.slot_mapping
    return (
        np.concatenate([decodes.token_ids, *(np.array(chunk.token_ids, np.int32) for chunk in prefills)]),
        np.concatenate([decodes.positions, *(np.arange(chunk.start, chunk.end, dtype=np.int32) for chunk in prefills)]),
        np.concatenate([decodes.slot_mapping, *(_slot_mapping(chunk) for chunk in prefills)]),
    )


def _slot_mapping(chunk: ChunkPlan) -> Ints:
    """The pages before `start` are another step's."""
    first_page = chunk.start // PAGE_TOKENS
    pages = np.array(chunk.block_table[first_page : num_pages_for(chunk.end)], np.int32)
    positions = np.arange(chunk.start, chunk.end, dtype=np.int32)
    slot_mapping: Ints = pages[positions // PAGE_TOKENS - first_page] * PAGE_TOKENS + positions % PAGE_TOKENS
    return slot_mapping


def _decode_work(decodes: DecodeRows, tiles: DecodeTiles) -> _HostWork:
    counts = decodes.num_pages
    items = decode_items(decodes.ends, np.cumsum(counts) - counts, tiles)
    tables = flat_tables(decodes.page_ids, decodes.table_rows, counts)
    size = WorkSize(len(items), int(items[:, 1].max(initial=0)) + 1)
    # never empty: a tensor without elements has no address, and a graph is captured with no decodes
    ints = np.concatenate([items.reshape(-1), tables, np.zeros(1, np.int32)])
    return _HostWork(ints, np.array([len(items)], np.int32), size)


def _prefill_arrays(batch: HostBatch, queries_per_tile: int) -> tuple[Ints, Ints, Ints, Ints]:
    """As `PrefillIndex` has them."""
    chunks = batch.prefills
    lengths = [len(chunk.token_ids) for chunk in chunks]
    ends = [chunk.end for chunk in chunks]
    first_rows = np.cumsum([len(batch.decodes), *lengths]).astype(np.int32)
    tiles = np.array(tiles_of(lengths, ends, queries_per_tile), np.int32).reshape(-1, 2)
    counts = [num_pages_for(end) for end in ends]
    tables = np.zeros((len(chunks), max(counts, default=0)), np.int32)
    for row, (chunk, count) in enumerate(zip(chunks, counts, strict=True)):
        tables[row, :count] = chunk.block_table[:count]
    return tables, first_rows, np.array(ends, np.int32), tiles

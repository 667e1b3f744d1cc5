"""A step's plan as arrays for the compiled forward pass, cut into slices of bounded size.

A slice has at most `max_rows` tokens, so that every buffer of the forward pass has a fixed size. Rows of a slice:

    | one-token pieces, shortest context first | piece | piece | …

A piece is the part of a chunk that falls into the slice. Slices are computed one after the other: the keys and values
that an earlier one has written are in the pages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weir.engine.plan import ChunkPlan
from weir.kv.geometry import PAGE_TOKENS, num_pages_for
from weir.model.rows import Piece, SampledRow, ScoredRows, rows_with_logits

Ints = npt.NDArray[np.int32]
_NO_INTS: Ints = np.zeros(0, np.int32)


class SliceArrays(NamedTuple):
    """What the compiled code gets, all C-contiguous. Decode pieces come first, in `block_tables` too.

    `token_ids` int64 [rows]; `positions`, `page_ids` [rows]; `decode_rows`, `decode_lengths` [decodes]: a row and the
    number of positions that it attends to; `first_rows`, `num_tokens`, `ends` [prefills]: a piece's rows, and the
    position behind its last token; `block_tables` [decodes + prefills, pages]; `logit_rows` [logits]: rows whose logits
    are wanted.
    """

    token_ids: npt.NDArray[np.int64]
    positions: Ints
    page_ids: Ints
    decode_rows: Ints
    decode_lengths: Ints
    first_rows: Ints
    num_tokens: Ints
    ends: Ints
    block_tables: Ints
    logit_rows: Ints

    def of_logit_rows(self) -> "SliceArrays":
        """The rows whose logits are wanted and no others, in their order, each as a decode at its position."""
        rows = self.logit_rows
        decodes = len(self.decode_rows)
        pieces = np.where(rows < decodes, rows, decodes + np.searchsorted(self.first_rows, rows, side="right") - 1)
        there = np.arange(len(rows), dtype=np.int32)
        return SliceArrays(
            token_ids=self.token_ids[rows],
            positions=self.positions[rows],
            page_ids=self.page_ids[rows],
            decode_rows=there,
            decode_lengths=self.positions[rows] + np.int32(1),
            first_rows=_NO_INTS,
            num_tokens=_NO_INTS,
            ends=_NO_INTS,
            block_tables=self.block_tables[pieces],
            logit_rows=there,
        )


@dataclass(frozen=True, slots=True)
class StepSlice:
    """One pass through all layers. Its logits are those of the rows `sampled`, in order, then those of `scored`."""

    arrays: SliceArrays
    sampled: tuple[SampledRow, ...]
    scored: tuple[ScoredRows, ...]

    @property
    def num_rows(self) -> int:
        return len(self.arrays.token_ids)


def cut_slices(decodes: Sequence[ChunkPlan], prefills: Sequence[ChunkPlan], max_rows: int) -> Iterator[StepSlice]:
    """Every token of the chunks, ordered as `ordered_chunks` has them, in exactly one slice."""
    if decodes and not prefills and len(decodes) <= max_rows and not any(chunk.score for chunk in decodes):
        yield _slice_of_decodes(decodes)
        return
    pieces: list[Piece] = []
    num_free = max_rows
    for chunk in (*decodes, *prefills):
        start, last = chunk.start, chunk.end
        while start < last:
            end = min(last, start + num_free)
            pieces.append(Piece(chunk, start, end))
            num_free -= end - start
            start = end
            if not num_free:
                yield _slice_of(pieces)
                pieces, num_free = [], max_rows
    if pieces:
        yield _slice_of(pieces)


def _slice_of(pieces: Sequence[Piece]) -> StepSlice:
    decodes = [piece for piece in pieces if piece.end - piece.start == 1]
    prefills = [piece for piece in pieces if piece.end - piece.start > 1]
    ordered = decodes + prefills
    tables = _block_tables(ordered)
    num_tokens = [piece.end - piece.start for piece in prefills]
    num_rows = len(decodes) + sum(num_tokens)
    positions = np.empty(num_rows, np.int32)
    page_ids = np.empty(num_rows, np.int32)
    positions[: len(decodes)] = [piece.start for piece in decodes]
    in_table = positions[: len(decodes)] // PAGE_TOKENS
    page_ids[: len(decodes)] = tables[np.arange(len(decodes)), in_table]
    row = len(decodes)
    for number, piece in enumerate(prefills, len(decodes)):
        there = np.arange(piece.start, piece.end, dtype=np.int32)
        positions[row : row + len(there)] = there
        page_ids[row : row + len(there)] = tables[number, there // PAGE_TOKENS]
        row += len(there)
    first_rows = np.cumsum([len(decodes), *num_tokens], dtype=np.int32)[:-1]
    sampled, scored = rows_with_logits(ordered)
    logit_rows = [*(row.row for row in sampled), *(row for rows in scored for row in rows.rows)]
    return StepSlice(
        SliceArrays(
            token_ids=np.array([token_id for piece in ordered for token_id in _token_ids(piece)], np.int64),
            positions=positions,
            page_ids=page_ids,
            decode_rows=np.arange(len(decodes), dtype=np.int32),
            decode_lengths=positions[: len(decodes)] + np.int32(1),
            first_rows=first_rows,
            num_tokens=np.array(num_tokens, np.int32),
            ends=np.array([piece.end for piece in prefills], np.int32),
            block_tables=tables,
            logit_rows=np.array(logit_rows, np.int32),
        ),
        sampled,
        scored,
    )


def _slice_of_decodes(chunks: Sequence[ChunkPlan]) -> StepSlice:
    """`_slice_of` of whole chunks of one token that nobody scores; quicker, for most steps are this."""
    starts = [chunk.start for chunk in chunks]
    positions = np.array(starts, np.int32)
    num_pages = starts[-1] // PAGE_TOKENS + 1
    tables = [chunk.block_table for chunk in chunks]
    sampled = tuple(
        [SampledRow(chunk.slot, row, chunk.sample) for row, chunk in enumerate(chunks) if chunk.sample is not None]
    )
    return StepSlice(
        SliceArrays(
            token_ids=np.array([chunk.token_ids[0] for chunk in chunks], np.int64),
            positions=positions,
            page_ids=np.array(
                [table[start // PAGE_TOKENS] for table, start in zip(tables, starts, strict=True)], np.int32
            ),
            decode_rows=np.arange(len(chunks), dtype=np.int32),
            decode_lengths=positions + np.int32(1),
            first_rows=_NO_INTS,
            num_tokens=_NO_INTS,
            ends=_NO_INTS,
            block_tables=np.array([_padded(table, num_pages) for table in tables], np.int32),
            logit_rows=np.array([row.row for row in sampled], np.int32),
        ),
        sampled,
        (),
    )


def _padded(table: tuple[int, ...], num_pages: int) -> tuple[int, ...]:
    """With page 0, which nothing reads; what is beyond is not read either."""
    num_missing = num_pages - len(table)
    return table + (0,) * num_missing if num_missing >= 0 else table[:num_pages]


def _token_ids(piece: Piece) -> tuple[int, ...]:
    chunk = piece.chunk
    if piece.end - piece.start == len(chunk.token_ids):
        return chunk.token_ids
    return chunk.token_ids[piece.start - chunk.start : piece.end - chunk.start]


def _block_tables(pieces: Sequence[Piece]) -> Ints:
    """Padded with page 0, which nothing reads."""
    tables = np.zeros((len(pieces), num_pages_for(max(piece.end for piece in pieces))), np.int32)
    for row, piece in zip(tables, pieces, strict=True):
        num_pages = num_pages_for(piece.end)
        row[:num_pages] = piece.chunk.block_table[:num_pages]
    return tables

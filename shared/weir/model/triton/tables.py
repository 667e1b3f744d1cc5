"""Block tables of the sequences that decode, kept on the host from step to step."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from weir.engine.plan import ChunkPlan
from weir.kv.geometry import PAGE_TOKENS

Ints = npt.NDArray[np.int32]


class TableRows:
    """One row of `page_ids` [rows, pages] a slot. Behind the end of a table a row holds anything.

    From one step to the next a sequence's table is the same, or has a page more. Tables are tuples, which do not
    change, so the one that a row was written from tells what is in it; nobody has to say when a sequence ends.
    """

    def __init__(self, num_rows: int, max_pages: int, num_pages: int) -> None:
        """For at most `num_rows` tables a step, of at most `max_pages` pages out of [0, num_pages)."""
        self.page_ids: Ints = np.zeros((num_rows, max_pages), np.int32)
        self._num_pages = num_pages
        self._tables: list[tuple[int, ...]] = [()] * num_rows
        """By row: what `page_ids` holds."""
        self._row_by_slot: dict[int, int] = {}
        self._free_rows = list(range(num_rows))

    def try_rows_of(self, chunks: Sequence[ChunkPlan]) -> list[int] | None:
        """The row of each chunk's table, of chunks with different slots; None if a table names a page that is not
        there. They are these tables until the next call."""
        row_by_slot, tables, rows = self._row_by_slot, self._tables, []
        for chunk in chunks:
            row, table = row_by_slot.get(chunk.slot), chunk.block_table
            if row is None:
                row = self._take_row(chunk.slot, chunks)
            if tables[row] is not table and not self._try_write(row, table):
                return None
            rows.append(row)
        return rows

    def _take_row(self, slot: int, chunks: Sequence[ChunkPlan]) -> int:
        if not self._free_rows:
            in_use = {chunk.slot for chunk in chunks}
            gone = [other for other in self._row_by_slot if other not in in_use]
            self._free_rows = [self._row_by_slot.pop(other) for other in gone]
        row = self._free_rows.pop()
        self._row_by_slot[slot] = row
        return row

    def _try_write(self, row: int, table: tuple[int, ...]) -> bool:
        known = self._tables[row]
        num_known = len(known)
        if len(table) < num_known:
            is_prefix, num_known = known[: len(table)] == table, len(table)
        else:
            is_prefix = table[:num_known] == known
        added = table[num_known:] if is_prefix else table
        if added:
            if min(added) < 0 or max(added) >= self._num_pages:
                return False
            first = len(table) - len(added)
            kept = added[: max(0, self.page_ids.shape[1] - first)]
            self.page_ids[row, first : first + len(kept)] = kept
        self._tables[row] = table
        return True


def flat_tables(page_ids: Ints, rows: npt.NDArray[np.intp], counts: Ints) -> Ints:
    """The first `counts[i]` pages of row `rows[i]`, one table behind the other."""
    firsts = np.cumsum(counts) - counts
    places = np.repeat(rows * page_ids.shape[1] - firsts, counts)
    places += np.arange(len(places))
    taken: Ints = page_ids.reshape(-1).take(places)
    return taken


def num_pages_of(ends: Ints) -> Ints:
    """Pages that hold positions [0, end) of each."""
    counts: Ints = (ends + (PAGE_TOKENS - 1)) // PAGE_TOKENS
    return counts

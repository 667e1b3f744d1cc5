"""Segments in which a process can die in any write: whole before it, or half way through it.

The tables are numpy views that count, the records' parts are behind a proxy that does. Who writes is known by the
process that runs; what is looked at from outside counts nothing.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.simulation.loop import PROCESS, ProcessDied
from weir.kv.arena.segment import Segment
from weir.kv.records.record import SequenceRecord


def _may_write() -> bool:
    """False: the process dies in this write."""
    process = PROCESS.get(None)
    return process is None or process.count_write()


class MortalRows(np.ndarray[Any, Any]):
    """Rows of a table of the segment."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if _may_write():
            super().__setitem__(key, value)
            return
        if isinstance(key, np.ndarray) and key.dtype != np.bool_:
            half = key[: len(key) // 2]
            super().__setitem__(half, value if np.ndim(value) == 0 else np.asarray(value)[: len(half)])
        raise ProcessDied


class MortalBytes:
    """A part of a record."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def __getitem__(self, key: Any) -> Any:
        return self._memory[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        if _may_write():
            self._memory[key] = value
            return
        if isinstance(key, slice):
            start, stop, _ = key.indices(len(self._memory))
            half = (stop - start) // 2
            self._memory[start : start + half] = value[:half]
        raise ProcessDied


class MortalRecord(SequenceRecord):
    """The parts in which the order of writes counts."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for name in ("_headers", "_params", "_token_log", "_block_table"):
            setattr(self, name, MortalBytes(getattr(self, name)))


class MortalSegment(Segment):
    """Every process of the world maps this one."""

    def _rows(self, dtype: np.dtype[Any], offset: int, count: int) -> NDArray[Any]:
        return super()._rows(dtype, offset, count).view(MortalRows)

    def record(self, slot: int) -> SequenceRecord:
        self._check_slot(slot)
        start = self._layout.records + slot * self._layout.record_bytes
        annex = None if self._annex_file is None else self.annex(slot)
        return MortalRecord(self._memory[start : start + self._layout.record_bytes], self.geometry, annex)

"""One budget of cores for all workers of a machine.

Each worker marks itself busy while it computes, in a file that all of them map. Whoever begins takes its share of the
cores: all of them while it is alone, half beside one other busy worker, and so on. Nobody waits, and a share is
looked at again every few milliseconds; two workers that begin in the same instant see each other too.

    slot i of the file: SLOT_BYTES bytes, the first of them 1 while the worker of that slot computes

A worker holds a lock on its slot (an open-file-description lock on its first byte) for its whole life. The kernel takes
it away when the process ends, however it ends, so a mark counts only while its slot is locked.
"""

import fcntl
import mmap
import os
import struct
from pathlib import Path

NUM_SLOTS = 256
SLOT_BYTES = 64
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid


class CoreBudget:
    """Implements `weir.model.cpu.core_share.CoreShare`. `path` is made if it is not there; its folder must be."""

    def __init__(self, path: Path, num_cores: int) -> None:
        """Raises OSError if the file cannot be made, or has no free slot."""
        if num_cores < 1:
            raise ValueError(f"num_cores is {num_cores}, expected at least 1")
        self.most = num_cores
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(self._descriptor).st_size < NUM_SLOTS * SLOT_BYTES:
                os.ftruncate(self._descriptor, NUM_SLOTS * SLOT_BYTES)
            self._marks = mmap.mmap(self._descriptor, NUM_SLOTS * SLOT_BYTES)
            self._own = self._take_slot(path)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._marks[self._own] = 0
        self._num_looks = self._num_others_seen = 0

    def begin(self) -> int:
        self._marks[self._own] = 1
        return max(1, self.most // self._look())

    def end(self) -> None:
        self._look()
        self._marks[self._own] = 0

    def take_mean_others(self) -> float:
        """Of what was seen at the beginning and at the end of each piece of work."""
        mean = self._num_others_seen / max(1, self._num_looks)
        self._num_looks = self._num_others_seen = 0
        return mean

    def close(self) -> None:
        """Gives the slot back."""
        self._marks.close()
        os.close(self._descriptor)

    def _look(self) -> int:
        """How many workers are busy, this one among them."""
        num_busy = self._num_busy()
        self._num_looks += 1
        self._num_others_seen += num_busy - 1
        return num_busy

    def _num_busy(self) -> int:
        marks = self._marks[::SLOT_BYTES]
        if marks.count(1) == 1:
            return 1
        return sum(1 for slot, mark in enumerate(marks) if mark and self._is_alive(slot))

    def _is_alive(self, slot: int) -> bool:
        if slot * SLOT_BYTES == self._own:
            return True
        answer = fcntl.fcntl(self._descriptor, fcntl.F_OFD_GETLK, _lock_of(slot))
        lock_type: int = _FLOCK.unpack(answer)[0]
        return lock_type != fcntl.F_UNLCK

    def _take_slot(self, path: Path) -> int:
        """The byte of the first slot that nobody holds."""
        for slot in range(NUM_SLOTS):
            try:
                fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _lock_of(slot))
            except BlockingIOError:
                continue
            return slot * SLOT_BYTES
        raise OSError(f"{path}: all {NUM_SLOTS} slots are taken by running workers")


def _lock_of(slot: int) -> bytes:
    return _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, slot * SLOT_BYTES, 1, 0)

"""The swap file: where the pages of preempted sequences wait, in memory of the host outside the arena.

    slots   0 1 2 … num_slots - 1     one page each, `page_bytes` apart

The file has no name, so it ends with its process. Its room is taken slot by slot as it is used and then kept;
posix_fallocate makes a full file system an answer and not a SIGBUS. Each page is checksummed (xxh3) when it leaves.
"""

import errno
import logging
import mmap
import os
import tempfile
import weakref
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from weir.kv.geometry import ArenaGeometry

_log = logging.getLogger(__name__)
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT)

_DEFAULT_SHARE = 4


def num_swap_slots(swap_bytes: int, geometry: ArenaGeometry) -> int:
    """Pages that fit into `swap_bytes`; negative: a quarter of the arena's pages."""
    return geometry.num_pages // _DEFAULT_SHARE if swap_bytes < 0 else swap_bytes // geometry.page_bytes


class SwapFile:
    """Bytes only: which page is in which slot is the engine's to know. Used by the thread that runs steps alone.

    `slots`: the mapped file, uint8 [num_slots, page_bytes].
    """

    def __init__(self, directory: Path, page_bytes: int, num_slots: int) -> None:
        """Takes no room yet. Raises OSError if no file can be made in `directory`."""
        self._page_bytes = page_bytes
        with tempfile.TemporaryFile(dir=directory) as file:
            file.truncate(page_bytes * num_slots)
            mapping = mmap.mmap(file.fileno(), page_bytes * num_slots)
            self._fd = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._fd)
        self.slots: npt.NDArray[np.uint8] = np.frombuffer(mapping, np.uint8).reshape(num_slots, page_bytes)
        self._checksums: dict[int, int] = {}
        self._allocated: set[int] = set()
        self._is_known_full = False

    def try_store(self, slot: int, page: npt.NDArray[np.uint8]) -> bool:
        """Copies a page [page_bytes] to its slot. False: the file system has no room for it."""
        if not self._try_allocate(slot):
            return False
        self.slots[slot] = page
        self._checksums[slot] = _checksum(page)
        return True

    def try_load(self, slot: int, page: npt.NDArray[np.uint8]) -> bool:
        """Copies a page [page_bytes] back. False: the bytes are not those that were stored; do not use them."""
        page[:] = self.slots[slot]
        return self._checksums.get(slot) == _checksum(page)

    def _try_allocate(self, slot: int) -> bool:
        if slot in self._allocated:
            return True
        try:
            os.posix_fallocate(self._fd, slot * self._page_bytes, self._page_bytes)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            if not self._is_known_full:
                _log.warning("the swap file gets no more room (%s): preempted sequences are computed again", error)
            self._is_known_full = True
            return False
        self._allocated.add(slot)
        return True


def _checksum(page: npt.NDArray[np.uint8]) -> int:
    return xxhash.xxh3_64_intdigest(page.data)

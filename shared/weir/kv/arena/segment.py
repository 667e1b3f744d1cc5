"""The segment: one file in /dev/shm that holds the pages of a host and everything that is known about them.

Made with open + posix_fallocate + mmap. multiprocessing.shared_memory would unlink it when a worker dies; without
posix_fallocate a full /dev/shm is a SIGBUS at some later write and not an error now. The annexes of the records alone
are a hole in it: the mapping must not be touched there.
"""

import errno
import logging
import mmap
import os
import uuid
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weir.core.process import own_pid_namespace, try_read_start_ticks
from weir.kv.arena.integrity import find_damage
from weir.kv.arena.lease import LeaseTable
from weir.kv.arena.ownership import OwnershipTable
from weir.kv.arena.segment_file import (
    SegmentError,
    is_mapped,
    lock,
    map_as_owner,
    map_as_worker,
    open_own,
    path_of,
    populate,
)
from weir.kv.geometry import ArenaGeometry
from weir.kv.layout import (
    ANNEX_BYTES,
    COUNTERS_DTYPE,
    HEADER_BYTES,
    LEASE_DTYPE,
    MAX_LEASES,
    PAGE_DTYPE,
    SLOT_DTYPE,
    SegmentHeader,
    SegmentLayout,
    SegmentMismatch,
    layout_of,
    pack_header,
    unpack_header,
)
from weir.kv.prefixes import PageIds
from weir.kv.records.annex import AnnexFile, RecordAnnex
from weir.kv.records.record import SequenceRecord

__all__ = [
    "DEFAULT_DIRECTORY",
    "ClaimedSegment",
    "Segment",
    "SegmentError",
    "claim_segment",
    "segment_path",
    "segment_paths",
    "try_find_mismatch",
    "try_read_header",
]

_log = logging.getLogger(__name__)

DEFAULT_DIRECTORY = Path("/dev/shm")

_MIB = 1 << 20


def segment_path(instance: str, directory: Path = DEFAULT_DIRECTORY, index: int = 0) -> Path:
    """Where a segment of an instance lies; a host has one a model. `index`: of its transfer service."""
    return directory / f"weir-{instance}-arena{f'-{index}' if index else ''}"


def segment_paths(instance: str, directory: Path = DEFAULT_DIRECTORY) -> tuple[Path, ...]:
    """All segments of an instance that are there."""
    first = segment_path(instance, directory)
    further = (
        path for path in directory.glob(f"{escape(first.name)}-*") if path.name[len(first.name) + 1 :].isdecimal()
    )
    return tuple(sorted(path for path in (first, *further) if path.is_symlink() or path.exists()))


class Segment:
    """One mapping of the file. Views taken from it stay valid after `close`: the last one to go ends the mapping."""

    def __init__(
        self, path: Path, header: SegmentHeader, mapping: mmap.mmap, lock_fd: int | None, fd: int | None = None
    ) -> None:
        """Owns the descriptors. `fd`: of the file; without one there are no annexes."""
        self.path = path
        self.geometry = header.geometry
        self.arena_id = header.arena_id
        self.model_digest = header.model_digest
        self.pid_namespace = header.pid_namespace
        self._layout = layout_of(header.geometry)
        self._memory = memoryview(mapping)
        self._lock_fd = lock_fd
        self._annex_file = None if fd is None else AnnexFile(fd, path.parent)

    @classmethod
    def create(cls, path: Path, geometry: ArenaGeometry, model_digest: str) -> "Segment":
        """Makes, pre-faults and locks a new segment.

        It has no name before it is whole, so a creator that dies leaves nothing. Raises SegmentError if there is too
        little room, or if there is a file at `path`.
        """
        header = SegmentHeader(geometry, uuid.uuid4().hex, model_digest, own_pid_namespace())
        lock_fd = os.open(path.parent, os.O_TMPFILE | os.O_RDWR, 0o600)
        try:
            lock(lock_fd, path)
            layout = layout_of(geometry)
            _allocate(lock_fd, layout, path)
            os.pwrite(lock_fd, pack_header(header), 0)
            _, mapping, fd = map_as_owner(lock_fd)
            segment = cls(path, header, mapping, lock_fd, fd)
            populate(mapping, _memory_ranges(layout))
            segment.counters["next_lease_id"] = 1
            segment.counters["next_attachment"] = 1
            _give_name(lock_fd, path)
        except BaseException:
            os.close(lock_fd)
            raise
        return segment

    @classmethod
    def open(cls, path: Path) -> "Segment":
        """Maps an existing segment, pre-faulted. For workers: it is not removed while they map it.

        Raises SegmentError for a file that another user can have put there, SegmentMismatch, or FileNotFoundError.
        """
        header, mapping, fd = map_as_worker(path)
        populate(mapping, _memory_ranges(layout_of(header.geometry)))
        return cls(path, header, mapping, lock_fd=None, fd=fd)

    @classmethod
    def take(cls, path: Path) -> "Segment":
        """Maps and locks an existing segment. For the transfer service.

        Raises SegmentError while another process holds the lock and for a file that another user can have put there,
        SegmentMismatch, or FileNotFoundError.
        """
        lock_fd = open_own(path)
        try:
            lock(lock_fd, path)
            if os.fstat(lock_fd).st_nlink == 0:
                raise FileNotFoundError(errno.ENOENT, "removed by its owner while it was being opened", str(path))
            header, mapping, fd = map_as_owner(lock_fd)
            return cls(path, header, mapping, lock_fd, fd)
        except BaseException:
            os.close(lock_fd)
            raise

    @property
    def total_bytes(self) -> int:
        return self._layout.total_bytes

    @property
    def counters(self) -> NDArray[Any]:
        """One row of COUNTERS_DTYPE, shape []."""
        return self._rows(COUNTERS_DTYPE, self._layout.counters, 1)[0:1].reshape(())

    @property
    def lease_rows(self) -> NDArray[Any]:
        """LEASE_DTYPE, shape [MAX_LEASES]."""
        return self._rows(LEASE_DTYPE, self._layout.leases, MAX_LEASES)

    @property
    def slot_rows(self) -> NDArray[Any]:
        """SLOT_DTYPE, shape [num_slots]."""
        return self._rows(SLOT_DTYPE, self._layout.slots, self.geometry.num_slots)

    @property
    def page_rows(self) -> NDArray[Any]:
        """PAGE_DTYPE, shape [num_pages]."""
        return self._rows(PAGE_DTYPE, self._layout.pages, self.geometry.num_pages)

    @property
    def pages(self) -> NDArray[np.uint8]:
        """The pages' bytes: uint8, shape [num_pages, page_bytes]. Raises ValueError if they are on a device."""
        if self.geometry.pages_on_device:
            raise ValueError(f"the pages of {self.path} are on a device: they are mapped by `weir.kv.memory.device`")
        shape = (self.geometry.num_pages, self.geometry.page_bytes)
        return np.frombuffer(self._memory, np.uint8, shape[0] * shape[1], self._layout.page_data).reshape(shape)

    def record(self, slot: int) -> SequenceRecord:
        """The sequence record of a slot. Raises IndexError for a slot that is not there."""
        self._check_slot(slot)
        start = self._layout.records + slot * self._layout.record_bytes
        annex = None if self._annex_file is None else self.annex(slot)
        return SequenceRecord(self._memory[start : start + self._layout.record_bytes], self.geometry, annex)

    def annex(self, slot: int) -> RecordAnnex:
        """That of the record of a slot. Raises IndexError for a slot that is not there."""
        self._check_slot(slot)
        if self._annex_file is None:
            raise RuntimeError(f"{self.path}: annexes are in a file, this segment has none")
        return RecordAnnex(self._annex_file, self._layout.annexes + slot * ANNEX_BYTES)

    def begin_incarnation(self) -> int:
        """For the transfer service, once a start: a number above that of every earlier process of this segment.

        Counted and not taken from a clock, which may go backwards between two starts.
        """
        self.counters["incarnation"] += 1
        return int(self.counters["incarnation"])

    def close(self) -> None:
        """Gives the lock and this object's hold on the mapping back. The file stays."""
        self._memory = memoryview(b"")
        if self._annex_file is not None:
            self._annex_file.close()
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def unlink(self) -> None:
        """Removes the file. For the transfer service, once nobody holds a lease. May be called twice."""
        self.path.unlink(missing_ok=True)

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.geometry.num_slots:
            raise IndexError(f"slot {slot}: this arena has {self.geometry.num_slots}")

    def _rows(self, dtype: np.dtype[Any], offset: int, count: int) -> NDArray[Any]:
        return np.frombuffer(self._memory, dtype, count, offset)


@dataclass(frozen=True, slots=True)
class ClaimedSegment:
    """What `claim_segment` came to; `is_new` is false where a live segment was taken over."""

    segment: Segment
    is_new: bool


def claim_segment(path: Path, geometry: ArenaGeometry, model_digest: str) -> ClaimedSegment:
    """Takes over the segment at `path` if it has this geometry and model, and tables that can be; removes any other and
    makes a new one.

    Raises SegmentError if another transfer service has it, if it is another one that workers still map, if it is a file
    that another user can have put there, or if there is too little room.
    """
    try:
        segment = Segment.take(path)
    except FileNotFoundError:
        return ClaimedSegment(Segment.create(path, geometry, model_digest), is_new=True)
    except SegmentMismatch as mismatch:
        _remove_left_over(path, str(mismatch), "")
    else:
        difference = _difference(segment, geometry, model_digest) or _damage(segment)
        if difference is None:
            return ClaimedSegment(segment, is_new=False)
        workers = _name_workers(segment)
        segment.close()
        _remove_left_over(path, difference, workers)
    return ClaimedSegment(Segment.create(path, geometry, model_digest), is_new=True)


def try_find_mismatch(path: Path) -> str | None:
    """Why this program could not go on with the segment at `path`. None: it could, or there is none. Only looks."""
    try:
        _read_header(path)
    except FileNotFoundError:
        return None
    except SegmentMismatch as mismatch:
        return str(mismatch)
    return None


def try_read_header(path: Path) -> SegmentHeader | None:
    """Of the segment at `path`. None: there is none that this program could go on with. Only looks."""
    try:
        return _read_header(path)
    except (OSError, SegmentMismatch):
        return None


def _read_header(path: Path) -> SegmentHeader:
    with path.open("rb") as file:
        return unpack_header(file.read(HEADER_BYTES), path.stat().st_size)


def _remove_left_over(path: Path, reason: str, workers: str) -> None:
    """Who maps it loses the pages that it computes with: it is removed once nobody does."""
    fd = open_own(path)
    try:
        lock(fd, path)
        if is_mapped(fd):
            raise SegmentError(
                f"{path} cannot be replaced ({reason}): {workers or 'a process'} still maps it; end what does "
                f"(`weir down`; `fuser {path}` names it) or choose another instance name"
            )
        _log.warning("left-over segment %s of an earlier run removed: %s", path, reason)
        path.unlink()
    finally:
        os.close(fd)


def _name_workers(segment: Segment) -> str:
    """Those with a lease that are alive, as far as they can be seen from here."""
    if segment.pid_namespace != own_pid_namespace():
        return ""
    try:
        leases = LeaseTable(segment.lease_rows, segment.counters).all()
    except ValueError:  # damaged
        return ""
    living = [lease for lease in leases if try_read_start_ticks(lease.process.pid) == lease.process.start_ticks]
    return ", ".join(f"worker {lease.worker_id} (process {lease.process.pid})" for lease in living)


def _difference(segment: Segment, geometry: ArenaGeometry, model_digest: str) -> str | None:
    if segment.geometry != geometry:
        return f"it has {segment.geometry}, wanted is {geometry}"
    if segment.model_digest != model_digest:
        return f"it is of model {segment.model_digest!r}, wanted is {model_digest!r}"
    if segment.pid_namespace != own_pid_namespace():
        return "it is of another pid namespace, whose processes cannot be seen from here"
    return None


def _damage(segment: Segment) -> str | None:
    """What only turned bits explain, in the tables that have no checksums."""
    records = [segment.record(slot) for slot in range(segment.geometry.num_slots)]

    def block_table_of(slot: int) -> PageIds | None:
        summary = records[slot].summarize()
        return None if summary is None else summary.page_ids

    table = OwnershipTable(segment.page_rows, segment.slot_rows)
    found = find_damage(segment.lease_rows, segment.counters, table, block_table_of)
    return f"its tables are damaged: {found}" if found else None


def _give_name(fd: int, path: Path) -> None:
    try:
        os.link(path_of(fd), path, src_dir_fd=fd)  # with src_dir_fd os.link follows the link in /proc
    except FileExistsError:
        raise SegmentError(f"{path} exists: another transfer service has just made it") from None


def _memory_ranges(layout: SegmentLayout) -> tuple[tuple[int, int], tuple[int, int]]:
    """(start, end) of what has memory from the start: all but the annexes."""
    return (0, layout.annexes), (layout.page_data, layout.total_bytes)


def _allocate(fd: int, layout: SegmentLayout, path: Path) -> None:
    try:
        for start, end in _memory_ranges(layout):
            if end > start:
                os.posix_fallocate(fd, start, end - start)
        os.ftruncate(fd, layout.total_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        os.ftruncate(fd, 0)  # what was allocated before it failed counts as free
        file_system = os.fstatvfs(fd)
        free_bytes = file_system.f_bavail * file_system.f_frsize
        raise SegmentError(
            f"{path.parent} is too small: the arena needs {layout.memory_bytes / _MIB:.0f} MiB, "
            f"free are {free_bytes / _MIB:.0f} MiB; make it larger (`mount -o remount,size=… {path.parent}`, "
            f"or shm_size in Compose), remove left-over files there, or give a smaller --arena-bytes"
        ) from error

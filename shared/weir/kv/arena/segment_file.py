"""The file of a segment: whose it must be, who maps it, and how it comes into memory.

A worker's mapping holds a shared lock on the file (an open file description's, fcntl(2)): it goes with the mapping,
however its process ends, and is seen from any pid namespace.
"""

import errno
import fcntl
import mmap
import os
import stat
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from weir.kv.layout import HEADER_BYTES, SegmentHeader, unpack_header

_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module has no name for it
_POPULATE_STEP_BYTES = 64 << 20  # madvise holds the interpreter lock: other threads get a turn between steps
_FLOCK = struct.Struct("@hhqqi")  # struct flock: type, whence, start, length, pid
_USED_BYTE = (os.SEEK_SET, 0, 1, 0)
_MODE = 0o600


class SegmentError(Exception):
    """The segment cannot be made or taken; the message says why and what to do."""


def open_own(path: Path) -> int:
    """Opens a segment's file for reading and writing, after making sure that no other user can have put it there.

    Raises SegmentError for anything but a regular file of this user's with mode 0600, and FileNotFoundError.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _unsafe(path, _what_is(path) or error.strerror or str(error)) from error
    problem = _problem_of(os.fstat(fd))
    if problem is not None:
        os.close(fd)
        raise _unsafe(path, problem)
    return fd


def lock(fd: int, path: Path) -> None:
    """The lock says that a transfer service has the segment. It goes with its process, however that ends."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SegmentError(
            f"{path} is in use by another transfer service; stop it (`weir down`) or choose another instance name"
        ) from None


def is_mapped(fd: int) -> bool:
    """Whether a worker maps the file, of this process or any other."""
    held = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, *_USED_BYTE))
    return int(_FLOCK.unpack(held)[0]) != fcntl.F_UNLCK


class MappedFile(NamedTuple):
    """`fd` is a descriptor of the same file, without a lock; its owner closes it."""

    header: SegmentHeader
    mapping: mmap.mmap
    fd: int


def try_remove_unused(path: Path) -> bool:
    """Removes what is at `path`, whatever version it has. False: a transfer service has it, or a worker maps it, of
    whatever instance. Raises FileNotFoundError."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError:  # a link, say: nobody has that as a segment
        path.unlink()
        return True
    try:
        lock(fd, path)
        if is_mapped(fd):
            return False
        path.unlink()
    except SegmentError:
        return False
    finally:
        os.close(fd)
    return True


def map_as_worker(path: Path) -> MappedFile:
    """Raises what `open_own` and `unpack_header` raise."""
    fd = open_own(path)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, *_USED_BYTE))
        header, mapping = _map(fd)  # the mapping keeps a copy of the descriptor, and this lock with it
        return MappedFile(header, mapping, os.open(path_of(fd), os.O_RDWR))
    finally:
        os.close(fd)


def map_as_owner(lock_fd: int) -> MappedFile:
    """Not by the descriptor of the lock: the mapping would keep a copy of it, and the lock with it."""
    fd = os.open(path_of(lock_fd), os.O_RDWR)
    try:
        return MappedFile(*_map(fd), fd)
    except BaseException:
        os.close(fd)
        raise


def path_of(fd: int) -> Path:
    """A name of an open file, also of one that has no name."""
    return Path(f"/proc/self/fd/{fd}")


def populate(mapping: mmap.mmap, ranges: Sequence[tuple[int, int]], step_bytes: int = _POPULATE_STEP_BYTES) -> None:
    """First touch is ten times slower than later ones: it is done here and not in a request's time.

    `ranges`: (start, end) of what the file has memory for, on page boundaries; touching a hole would take some.
    """
    for start, end in _steps(ranges, step_bytes):
        length = end - start
        try:
            mapping.madvise(_MADV_POPULATE_WRITE, start, length)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # An older kernel. Writing would change a segment in use; reading maps the pages that fallocate made.
            np.frombuffer(mapping, np.uint8, length, start)[:: mmap.PAGESIZE].max()


def _steps(ranges: Sequence[tuple[int, int]], step_bytes: int) -> Iterator[tuple[int, int]]:
    for start, end in ranges:
        for step_start in range(start, end, step_bytes):
            yield step_start, min(step_start + step_bytes, end)


def _map(fd: int) -> tuple[SegmentHeader, mmap.mmap]:
    file_bytes = os.fstat(fd).st_size
    header = unpack_header(os.pread(fd, HEADER_BYTES, 0), file_bytes)
    mapping = mmap.mmap(fd, file_bytes)
    if hasattr(mmap, "MADV_DONTFORK"):
        # A child that is forked and lives on would write into pages that fencing its parent takes to be quiet.
        mapping.madvise(mmap.MADV_DONTFORK)
    return header, mapping


def _what_is(path: Path) -> str | None:
    try:
        return _problem_of(path.lstat())
    except OSError:
        return None


def _problem_of(found: os.stat_result) -> str | None:
    if stat.S_ISLNK(found.st_mode):
        return "it is a symbolic link"
    if not stat.S_ISREG(found.st_mode):
        return "it is not a regular file"
    if found.st_uid != os.getuid():
        return f"it belongs to user {found.st_uid}, this process runs as user {os.getuid()}"
    if stat.S_IMODE(found.st_mode) != _MODE:
        return f"its mode is {stat.S_IMODE(found.st_mode):04o}, a segment's is {_MODE:04o}"
    return None


def _unsafe(path: Path, problem: str) -> SegmentError:
    return SegmentError(
        f"{path} is not used as a segment: {problem}; remove it, or choose another instance name, once you know whose "
        "it is: it would hold what users write"
    )

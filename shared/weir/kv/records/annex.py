"""The annex of a sequence record: what few sequences have, such as the source of a grammar.

    0      CRC of the rest, length    written last
    8      content                    at most MAX_ANNEX_CONTENT_BYTES

The annexes of all slots are a hole in the segment's file: one takes memory when it is written, and gives it back when
it is cleared, which its record does when it begins or is cleared itself. Bytes go through the file's descriptor and
never through the mapping, where a full /dev/shm would be a SIGBUS, for a reader of a hole too; here it is an error.
"""

import ctypes
import errno
import os
import struct
import weakref
import zlib
from pathlib import Path

from weir.kv.layout import ANNEX_BYTES

_HEADER = struct.Struct("<II")
_LENGTH = struct.Struct("<I")
_NOTHING = bytes(_HEADER.size)
MAX_ANNEX_CONTENT_BYTES = ANNEX_BYTES - _HEADER.size
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG)
_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01  # fallocate(2); the os module has no name for it
_MIB = 1 << 20


class AnnexFull(Exception):
    """There is no memory for what was to be written; the message says what to do. The annex is empty."""


class DamagedAnnex(Exception):
    """What the annex holds is not what was written."""


class AnnexFile:
    """The segment's file as its annexes use it. Owns the descriptor, at most until nobody has this object any more."""

    def __init__(self, fd: int, directory: Path) -> None:
        self._fd = fd
        self._closing = weakref.finalize(self, os.close, fd)
        self._directory = directory

    @property
    def is_open(self) -> bool:
        return self._closing.alive

    def read(self, num_bytes: int, start: int) -> bytes:
        """All of them. A hole reads as zeros and stays one."""
        return os.pread(self._require_fd(), num_bytes, start)

    def write(self, content: bytes, start: int) -> None:
        """All of it. Raises AnnexFull, having written a part."""
        fd, left = self._require_fd(), memoryview(content)
        try:
            while left:
                num_written = os.pwrite(fd, left, start)
                start += num_written
                left = left[num_written:]
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            file_system = os.fstatvfs(fd)
            free_bytes = file_system.f_bavail * file_system.f_frsize
            raise AnnexFull(
                f"{len(content)} bytes beside a sequence's record: {self._directory} is full "
                f"({free_bytes / _MIB:.1f} MiB free; {error.strerror}); make it larger "
                f"(`mount -o remount,size=… {self._directory}`, or shm_size in Compose), or remove left-over files"
            ) from error

    def free(self, num_bytes: int, start: int) -> None:
        """Gives the memory back, where the system can do that; the bytes are zeros then."""
        fallocate = getattr(_libc, "fallocate", None)
        if fallocate is not None:
            offset, length = ctypes.c_int64(start), ctypes.c_int64(num_bytes)
            fallocate(self._require_fd(), _PUNCH_HOLE_KEEP_SIZE, offset, length)

    def close(self) -> None:
        """May be called twice."""
        self._closing()

    def _require_fd(self) -> int:
        if not self.is_open:
            raise RuntimeError("the segment is closed: its annexes cannot be used any more")
        return self._fd


class RecordAnnex:
    """The annex of one slot, at `start` of the file; written by the owner of the slot alone."""

    def __init__(self, file: AnnexFile, start: int) -> None:
        self._file = file
        self._start = start

    def write(self, content: bytes) -> None:
        """Replaces what is there. A death half way leaves it empty. Raises ValueError for too much, AnnexFull."""
        if len(content) > MAX_ANNEX_CONTENT_BYTES:
            raise ValueError(f"content: {len(content)} bytes, an annex holds at most {MAX_ANNEX_CONTENT_BYTES}")
        self.clear()
        if not content:
            return
        length = _LENGTH.pack(len(content))
        header = _HEADER.pack(zlib.crc32(content, zlib.crc32(length)), len(content))
        try:
            self._file.write(content, self._start + _HEADER.size)
            self._file.write(header, self._start)
        except AnnexFull:
            self._file.free(ANNEX_BYTES, self._start)
            raise

    def read(self) -> bytes | None:
        """None: it is empty. Raises DamagedAnnex."""
        header = self._file.read(_HEADER.size, self._start)
        if header == _NOTHING:
            return None
        crc, length = _HEADER.unpack(header)
        if length > MAX_ANNEX_CONTENT_BYTES:
            raise DamagedAnnex(f"an annex says that it has {length} bytes, it holds at most {MAX_ANNEX_CONTENT_BYTES}")
        content = self._file.read(length, self._start + _HEADER.size)
        if zlib.crc32(content, zlib.crc32(header[_LENGTH.size :])) != crc:
            raise DamagedAnnex(f"the checksum of an annex of {length} bytes is wrong")
        return content

    def clear(self) -> None:
        """Empties it, and gives its memory back. Nothing happens once the segment is closed."""
        if self._file.is_open and self._file.read(_HEADER.size, self._start) != _NOTHING:
            self._file.write(_NOTHING, self._start)
            self._file.free(ANNEX_BYTES, self._start)


_libc = ctypes.CDLL(None)

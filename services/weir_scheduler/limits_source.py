"""The limits file on disk."""

import asyncio
import time
from pathlib import Path

from weir.core.errors import FieldViolation, InvalidRequest
from weir.scheduling.limits_file import MAX_FILE_BYTES

_SETTLED_S = 2.0
"""Younger than this, a file can change again without a new time of change."""


class LimitsSource:
    """Reads the file, and again when it has changed. Errors are InvalidRequest, as those of its content."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: tuple[int, ...] = ()

    async def read(self) -> str:
        return await asyncio.to_thread(self._read)

    async def try_read_changed(self) -> str | None:
        """None: it is as it was when it was read last, whether that went well or not."""
        return await asyncio.to_thread(self._try_read_changed)

    def _try_read_changed(self) -> str | None:
        stamp = self._stamp_now()
        if stamp and stamp == self._stamp:
            return None
        return self._read()

    def _read(self) -> str:
        self._stamp = self._stamp_now()
        try:
            with self.path.open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
            return content.decode()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest([FieldViolation("file", f"cannot be read: {error}")]) from error

    def _stamp_now(self) -> tuple[int, ...]:
        """Empty for a file that is gone, or has changed just now."""
        try:
            found = self.path.stat()
        except OSError:
            return (0,)
        is_settled = time.time() - found.st_mtime > _SETTLED_S
        return (found.st_mtime_ns, found.st_size, found.st_ino) if is_settled else ()

"""The limits file on disk."""

import asyncio
import time
from pathlib import Path

from weir.core.errors import FieldViolation, InvalidRequest
from weir.scheduling.limits.file import MAX_FILE_BYTES

_SETTLED_S = 2.0
"""Younger than this, a file can change again without a new time of change."""


class LimitsSource:
    """Reads the file, and again when it has changed. Errors are InvalidRequest, as those of its content.

    A change counts once two looks have found the same: whoever writes a file in place empties it first, and a file
    without keys would let everybody in.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: tuple[int, ...] = ()
        self._seen: str | None = None
        """At the last look; None: it could not be read, or was told already."""

    async def read(self) -> str:
        return await asyncio.to_thread(self._read)

    async def try_read_changed(self) -> str | None:
        """None: nothing has changed, or not for two looks yet."""
        return await asyncio.to_thread(self._try_read_changed)

    def _try_read_changed(self) -> str | None:
        stamp = self._stamp_now()
        if stamp and stamp == self._stamp and self._seen is None:
            return None
        seen, self._seen = self._seen, None
        text = self._read()
        if text != seen:
            self._seen = text
            return None
        return text

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

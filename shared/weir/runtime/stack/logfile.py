"""The log of a supervised process: written by the process itself, kept small by the supervisor."""

import os
import shutil
from pathlib import Path

MAX_LOG_BYTES = 16 * 1024 * 1024
_TAIL_BYTES = 16 * 1024


def rotate(path: Path) -> None:
    """Puts the log of the last start aside as `.1`; only for a log that nobody writes to."""
    if path.exists():
        path.replace(path.with_name(f"{path.name}.1"))


def open_for_child(path: Path) -> int:
    """A descriptor to hand to a process. Appending, so that `trim` can empty the file under its writer."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def trim(path: Path, max_bytes: int = MAX_LOG_BYTES) -> bool:
    """Copies a log that is too long to `.1` and empties it. Lines written in between are lost."""
    try:
        if path.stat().st_size <= max_bytes:
            return False
        shutil.copyfile(path, path.with_name(f"{path.name}.1"))
        os.truncate(path, 0)
    except FileNotFoundError:
        return False
    return True


def last_lines(path: Path, num_lines: int = 15) -> list[str]:
    """The end of a log; empty if there is none."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()[-num_lines:]
    except FileNotFoundError:
        return []

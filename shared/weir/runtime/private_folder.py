"""Folders whose files no other user of the machine can put there, replace or read."""

import os
import stat
from pathlib import Path

from weir.core.errors import WeirError

_PRIVATE_MODE = 0o700
_ADVICE = "set WEIR_RUNTIME_DIR to a folder of your own"


class UnsafeFolder(WeirError):
    """A folder is not this user's alone, or cannot be made; says what to do."""


def make_private_folder(folder: Path) -> None:
    """Makes it, and what it lies in, if need be.

    Raises UnsafeFolder unless it then is a real folder (no link), of this user's, with mode 0700. That what is made in
    it is of its group may be added: volumes of Kubernetes have it so, and folders in them inherit it.
    """
    found = _make(folder)
    mode = stat.S_IMODE(found.st_mode) & ~stat.S_ISGID
    if mode != _PRIVATE_MODE:
        raise UnsafeFolder(f"{folder} has mode {mode:04o}, must have 0700; `chmod 700 {folder}`, or {_ADVICE}")


def make_own_folder(folder: Path) -> None:
    """As `make_private_folder`, but others may look into it: what lies in it must be private itself."""
    if _make(folder).st_mode & stat.S_IWOTH:
        raise UnsafeFolder(f"{folder} can be written by every user; `chmod o-w {folder}`, or {_ADVICE}")


def _make(folder: Path) -> os.stat_result:
    try:
        folder.mkdir(mode=_PRIVATE_MODE, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise UnsafeFolder(f"{folder} cannot be made ({error.strerror or error}); {_ADVICE}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise UnsafeFolder(f"{folder} is a link and not a folder; remove it, or {_ADVICE}")
    if found.st_uid != os.getuid():
        raise UnsafeFolder(f"{folder} belongs to another user ({found.st_uid}); {_ADVICE}")
    return found

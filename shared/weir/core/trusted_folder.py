"""Folders of which all is believed that lies there: compiled kernels, as good as programs, and pages. Nobody else may
put anything there.

/home  root 0755 ─> ada  ada 0700 ─> .cache ─> weir ─> kernels ─> avx2-1f…  each ada's or root's, and nobody else
└ what lies above: nobody else may replace what lies in it                 may write there; links too are theirs
"""

import contextlib
import grp
import os
import pwd
import stat
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from weir.core.errors import WeirError

_MADE_MODE = 0o700
_MAX_LINKS = 40


class UntrustedFolder(WeirError):
    """Somebody else may have put there what is in it, or can. Says which folder, its mode, and what to do."""


def make_trusted_folder(folder: Path, root: Path, advice: str) -> None:
    """Makes it, and what it lies in, for this user alone. `root`: it or what it lies in, from where on nobody else may
    write at all; above it a folder of all, such as /tmp, may have the sticky bit. `advice`: how to use another one.

    Raises UntrustedFolder for what is there and cannot be trusted, or cannot be made.
    """
    is_own_group = cache(_is_own_group)
    try:
        for path, found in _walk(folder):
            _check(path, found, advice, is_own_group, may_be_sticky=True)
        for path in (folder, *folder.parents):
            if path.is_relative_to(root):
                real = path.resolve()
                _check(real, real.lstat(), advice, is_own_group)
        if stat.S_IMODE(folder.stat().st_mode) & 0o011:  # others may reach what lies in it
            _check_content(folder, advice, is_own_group)
    except OSError as error:
        raise UntrustedFolder(f"{folder} cannot be made or read ({error.strerror or error}); {advice}") from error


def _walk(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Each folder and each link on the way, from / on; a missing one is made. Raises OSError."""
    reached, left, num_links = Path("/"), list(reversed(folder.absolute().parts[1:])), 0
    yield reached, reached.lstat()
    while left:
        part = left.pop()
        if part == "..":
            reached = reached.parent
            continue
        path = reached / part
        try:
            found = path.lstat()
        except FileNotFoundError:
            path.mkdir(mode=_MADE_MODE, exist_ok=True)  # another process may be as far
            found = path.lstat()
        yield path, found
        if not stat.S_ISLNK(found.st_mode):
            reached = path
            continue
        num_links += 1
        if num_links > _MAX_LINKS:
            raise OSError(f"more than {_MAX_LINKS} links lead there")
        target = path.readlink()
        left += reversed(target.parts[1:] if target.is_absolute() else target.parts)
        reached = Path("/") if target.is_absolute() else reached


def _check(
    path: Path, found: os.stat_result, advice: str, is_own_group: Callable[[int], bool], *, may_be_sticky: bool = False
) -> None:
    """Raises UntrustedFolder."""
    if found.st_uid not in (0, os.getuid()):
        raise UntrustedFolder(
            f"{path} belongs to user {found.st_uid}, who could put files there for this one ({os.getuid()}) to use; "
            f"{advice}"
        )
    if stat.S_ISLNK(found.st_mode):  # its mode says nothing; where it leads is looked at next
        return
    mode = stat.S_IMODE(found.st_mode)
    if may_be_sticky and mode & stat.S_ISVTX:
        return
    by_others = mode & stat.S_IWOTH
    by_group = mode & stat.S_IWGRP and not is_own_group(found.st_gid)
    if by_others or by_group:
        raise UntrustedFolder(
            f"{path} has mode {mode:04o}: {'every user' if by_others else f'group {found.st_gid}'} could put files "
            f"there for this user to use; `chmod go-w {path}` if nobody has, or {advice}"
        )


def _check_content(folder: Path, advice: str, is_own_group: Callable[[int], bool]) -> None:
    """Raises UntrustedFolder, OSError."""
    for where, _, names in os.walk(folder):
        for name in ("", *names):
            path = Path(where, name)
            with contextlib.suppress(FileNotFoundError):  # gone meanwhile, as what numba writes before it has its name
                _check(path, path.lstat(), advice, is_own_group)


def _is_own_group(gid: int) -> bool:
    """The one that many systems make with a user: of the same name, with nobody else in it, whose first group or
    whose further one it is. Asks for all users, whom a directory service may have to send: once a check is enough."""
    try:
        name, group = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(gid)
    except KeyError:
        return False
    members = {*group.gr_mem, *(user.pw_name for user in pwd.getpwall() if user.pw_gid == gid)}
    return group.gr_name == name and members <= {name}

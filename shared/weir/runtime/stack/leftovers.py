"""Ends and removes what a supervisor left that was killed before it could clean up."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weir.core.errors import WeirError
from weir.core.process import ProcessIdentity
from weir.runtime.stack.paths import InstancePaths
from weir.runtime.stack.processes import end_processes, find_tagged, is_running
from weir.runtime.stack.state import identities_of, try_read_state

_TERM_S = 5.0
_KILL_S = 5.0


class StillRunning(WeirError):
    """A process survived SIGKILL, which only the kernel can explain."""


@dataclass(frozen=True, slots=True)
class Removed:
    """What was found of an earlier run. `in_use`: a segment of that name that others use, and that stays."""

    pids: tuple[int, ...]
    files: tuple[Path, ...]
    in_use: tuple[Path, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.pids or self.files)


async def remove_leftovers(
    paths: InstancePaths, *, term_s: float = _TERM_S, segment_dir: Path | None = None
) -> Removed:
    """Only while holding the instance's lock. Raises StillRunning.

    Processes are those of the state file that still are who they were, and those that carry the instance's tag: a
    supervisor can be killed between starting a process and writing it down.
    """
    # late, as it loads numpy, and `weir --help` this module
    from weir.kv.arena.segment import DEFAULT_DIRECTORY, segment_paths  # noqa: PLC0415
    from weir.kv.arena.segment_file import try_remove_unused  # noqa: PLC0415

    pids = await _end(find_leftover_processes(paths), term_s)
    name = paths.folder.name
    segments = segment_paths(name, segment_dir or DEFAULT_DIRECTORY)
    files = [path for path in (*segments, paths.arena_socket(), paths.state_file) if _is_own(path)]
    # Another user's cannot be removed; the transfer service refuses it and says whose it is. One that is in use is that
    # of an instance of the same name with another runtime folder, or of `weir serve`.
    in_use = tuple(segment for segment in segments if _is_own(segment) and not try_remove_unused(segment))
    paths.remove_volatile()
    return Removed(pids, tuple(path for path in files if path not in in_use), in_use)


def find_leftover_processes(paths: InstancePaths) -> list[ProcessIdentity]:
    """Processes of the instance that run now, its supervisor not included."""
    state = try_read_state(paths.state_file)
    recorded = () if state is None else identities_of(state)
    tagged = (process.identity for process in find_tagged(paths.folder))
    return [identity for identity in {*recorded, *tagged} if is_running(identity)]


def _is_own(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.getuid()
    except FileNotFoundError:
        return False


async def _end(identities: Sequence[ProcessIdentity], term_s: float) -> tuple[int, ...]:
    survivors = await end_processes(identities, term_s=term_s, kill_s=_KILL_S)
    if survivors:
        raise StillRunning(f"processes {survivors} do not end, not even by SIGKILL; see `ps -o pid,stat,wchan,cmd`")
    return tuple(sorted(identity.pid for identity in identities))

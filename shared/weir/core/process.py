"""Which process holds a lease: a pid alone can be used again, its start time cannot."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """`start_ticks`: start time in clock ticks since boot, the same number in every pid namespace."""

    pid: int
    start_ticks: int


def own_identity() -> ProcessIdentity:
    """The identity of this process."""
    start_ticks = try_read_start_ticks(os.getpid())
    if start_ticks is None:
        raise RuntimeError("/proc/self/stat cannot be read: Weir needs /proc to be mounted")
    return ProcessIdentity(os.getpid(), start_ticks)


def own_pid_namespace() -> int:
    """Inode number of the pid namespace of this process: two processes mean the same by a pid if theirs are equal."""
    return Path("/proc/self/ns/pid").stat().st_ino


def try_read_start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # Field 2 is the program's name in parentheses and may itself hold spaces and parentheses.
    return int(stat[stat.rindex(")") + 2 :].split()[19])

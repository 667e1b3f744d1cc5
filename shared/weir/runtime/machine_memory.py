"""How much memory this machine, or the container that this process is in, still has."""

import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def available_bytes(root: Path = _ROOT) -> int:
    """What new processes can take before something is swapped out or killed: MemAvailable, or what a cgroup of this
    process leaves if that is less. A file system's cache counts as free. `root`: where `proc` and `sys` are."""
    fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    names = ("MemAvailable",) if "MemAvailable" in fields else ("MemFree", "Cached")  # emulated kernels lack the first
    available = 1024 * sum(int(fields[name].split()[0]) for name in names)
    return max(0, min([available, *_left_in_cgroups(root)]))


def free_disk_bytes(folder: Path) -> int:
    """What this user can still write in a file system; of a tmpfs that is memory. Raises OSError."""
    file_system = os.statvfs(folder)
    return file_system.f_bavail * file_system.f_frsize


def _left_in_cgroups(root: Path) -> Iterator[int]:
    """Of each cgroup with a limit that this process is in, its parents included. Version 1 and 2."""
    for folder in _memory_cgroups(root):
        for limit, usage, cache in (
            ("memory.max", "memory.current", ("inactive_file", "active_file")),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
        ):
            limit_bytes = _try_read_number(folder / limit)
            usage_bytes = _try_read_number(folder / usage)
            if limit_bytes is not None and usage_bytes is not None:
                cached_bytes = sum(_statistic(folder / "memory.stat", name) for name in cache)
                yield limit_bytes - usage_bytes + cached_bytes


def _memory_cgroups(root: Path) -> Iterator[Path]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        folder = top / path.lstrip("/")  # in a container it may be a path of the host, that is not here
        yield from (one for one in (folder, *folder.parents) if one.is_relative_to(top) and one.is_dir())


def _try_read_number(path: Path) -> int | None:
    """None: not there, or no limit (`max`)."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _statistic(path: Path, name: str) -> int:
    try:
        fields = dict(line.split() for line in path.read_text().splitlines())
        return int(fields.get(name, 0))
    except (OSError, ValueError):
        return 0

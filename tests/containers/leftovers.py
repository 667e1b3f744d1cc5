"""What a run may not leave: in Docker before it ends, and on the host after."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.containers.engine import Engine, cgroups

from weir.core.addresses import is_port_free


def in_docker(engine: Engine) -> list[str]:
    """Containers, volumes and networks; empty: images alone are left."""
    left = [f"container {line}" for line in engine.docker("ps", "--all", "--format", "{{.Names}}").split()]
    left += [f"volume {line}" for line in engine.docker("volume", "ls", "--quiet").split()]
    networks = set(engine.docker("network", "ls", "--format", "{{.Name}}").split())
    return left + [f"network {name}" for name in sorted(networks - {"bridge", "host", "none"})]


@dataclass(frozen=True, slots=True)
class HostBefore:
    """What was there before, and is not this run's."""

    interfaces: frozenset[str]

    @classmethod
    def now(cls) -> "HostBefore":
        return cls(frozenset(_interfaces()))


def on_host(before: HostBefore, engine: Engine, ports: list[int]) -> list[str]:
    """Processes, mounts, network interfaces, cgroups, listeners and the run's own folder."""
    left = [f"process {line}" for line in _processes_of(engine.folder)]
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    left += [f"mount {line.split()[4]}" for line in mounts if any(str(f) in line for f in (engine.folder, engine.data))]
    left += [f"interface {name}" for name in _interfaces() if name not in before.interfaces]
    left += [f"cgroup {path}" for path in cgroups(engine.cgroup)]
    left += [f"port {port}" for port in ports if not is_port_free("127.0.0.1", port)]
    return left + ([f"folder {engine.folder}"] if engine.folder.exists() else [])


def _interfaces() -> list[str]:
    """Docker's kinds: bridges of networks, and the host's ends of containers' cables."""
    return [path.name for path in Path("/sys/class/net").iterdir() if path.name.startswith(("br-", "veth", "docker"))]


def _processes_of(folder: Path) -> Iterator[str]:
    """Those that name the folder: dockerd, containerd, and the shim of each container."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it may end meanwhile
            words = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(folder) in words:
                yield f"{path.name}: {words.strip()}"

"""Page memory of each device (see `weir.core.device`)."""

from collections.abc import Callable
from dataclasses import dataclass

from weir.core.device import Device
from weir.kv.arena.segment import Segment
from weir.kv.memory.cuda import CudaMemory
from weir.kv.memory.device import DeviceMemory, HostMemory


@dataclass(frozen=True, slots=True)
class MemoryKind:
    """How page memory of a device comes to be: `create(num_bytes)`, and `open(fd, num_bytes)` in other processes."""

    create: Callable[[int], DeviceMemory]
    open: Callable[[int, int], DeviceMemory]


def try_memory_kind(device: Device) -> MemoryKind | None:
    """None: pages lie in the segment."""
    if device == "cuda":
        return MemoryKind(CudaMemory.create, CudaMemory.open)
    if device == "interpreter":
        return MemoryKind(HostMemory.create, HostMemory.open)
    return None


@dataclass(frozen=True, slots=True)
class ArenaMemory:
    """An arena as a worker maps it. `pages` None: they are in the segment."""

    segment: Segment
    pages: DeviceMemory | None = None

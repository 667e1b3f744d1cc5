"""The hosts of a world: a real segment in memory each, and the handles by which processes there are fenced."""

from pathlib import Path

from tests.simulation.loop import SimProcess
from tests.simulation.mortal import MortalSegment
from weir.kv.arena.segment import claim_segment
from weir.kv.geometry import PAGE_TOKENS, ArenaGeometry
from weir_transfer.arena import ClaimedArena
from weir_transfer.messages import ArenaSettings

PAGE_BYTES = 8 * PAGE_TOKENS
NUM_SLOTS = 16
ARENA_SETTINGS = ArenaSettings(heartbeat_interval_ms=200, lease_ttl_ms=2000, prefix_wait_ms=3000, adoption_wait_ms=6000)


class Host:
    """One machine: its transfer service's segment outlives that service."""

    def __init__(self, index: int, folder: Path, num_pages: int, max_context_tokens: int) -> None:
        self.index = index
        self.socket = f"/sim/host-{index}/arena.sock"
        self.path = folder / f"arena-{index}"
        self.geometry = ArenaGeometry(PAGE_BYTES, num_pages, NUM_SLOTS, max_context_tokens)
        self.segment: MortalSegment | None = None
        """The newest one that was claimed."""

    def claim(self, process: SimProcess) -> ClaimedArena:
        """For a transfer service that starts. Its lock goes when it dies."""
        segment = claim_segment(self.path, self.geometry, "digest").segment
        assert isinstance(segment, MortalSegment)
        self.segment = segment
        process.on_death.append(segment.close)
        return ClaimedArena(segment, memory_server=None)


class ProcessHandle:
    """`weir_transfer.fence.ProcessHandle`: a descriptor of the world's."""

    def __init__(self, world: "Killer", process: SimProcess, fd: int) -> None:
        self._world = world
        self._process = process
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def kill(self) -> None:
        self._world.kill(self._process)

    def close(self) -> None:
        self._world.forget_handle(self._fd)


class Killer:
    """What handles need of their world."""

    def kill(self, process: SimProcess) -> None:
        raise NotImplementedError

    def forget_handle(self, fd: int) -> None:
        raise NotImplementedError

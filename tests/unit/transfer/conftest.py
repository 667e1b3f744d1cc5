"""An arena core over a small segment with a clock that stands still, and a whole service on a socket."""

import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from tests.unit.transfer.host import Host, open_two_hosts

from weir.core.clock import ManualClock
from weir.core.life import Attempt
from weir.core.process import ProcessIdentity
from weir.core.sampling import SamplingParams, StopRules
from weir.kv.arena.segment import Segment
from weir.kv.geometry import ArenaGeometry
from weir.kv.messages import Claims
from weir.kv.movers.mover import SharedMemoryMover
from weir.kv.records.record import SequenceParams
from weir_transfer.core import ArenaCore
from weir_transfer.lease_keeper import Countdowns
from weir_transfer.messages import ArenaSettings, LeaseRegistration

TICK_S = 0.05


class World:
    """A core, its segment and its clock; `restart` puts a new core over the segment, as a new process would."""

    def __init__(self, path: Path, segment_type: type[Segment] = Segment, *, adoption_wait_ms: int = 0) -> None:
        geometry = ArenaGeometry(page_bytes=4096, num_pages=40, num_slots=6, max_context_tokens=256)
        self.segment = segment_type.create(path, geometry, "digest")
        self.clock = ManualClock(1000.0)
        self.settings = ArenaSettings(heartbeat_interval_ms=200, lease_ttl_ms=2000, adoption_wait_ms=adoption_wait_ms)
        self.restart()

    def restart(self) -> None:
        mover = SharedMemoryMover(self.segment.geometry.num_pages)
        countdowns = Countdowns(self.clock, TICK_S)
        self.num_notifications = self.num_lease_ends = 0
        self.core = ArenaCore(
            self.segment, mover, countdowns, self.settings, self._on_settled, on_lease_end=self._on_lease_end
        )

    def _on_settled(self) -> None:
        self.num_notifications += 1

    def _on_lease_end(self) -> None:
        self.num_lease_ends += 1

    def registration(self, worker_id: str, lease_id: int = 0, claims: Claims | None = None) -> LeaseRegistration:
        process = ProcessIdentity(pid=sum(worker_id.encode()), start_ticks=77)
        return LeaseRegistration(worker_id, "decode", process, 4096, "digest", lease_id, claims or Claims())

    def write_sequence(self, slot: int, page_ids: tuple[int, ...], request_id: str = "r1") -> None:
        """What a worker writes: a published record of one output token."""
        record = self.segment.record(slot)
        record.begin(
            SequenceParams(
                request_id=request_id,
                attempt=Attempt(1, 0),
                gateway_id="gateway-0-00000000",
                prompt_token_ids=(1, 2, 3),
                sampling=SamplingParams(),
                stop=StopRules(max_tokens=8),
                num_reserved_pages=len(page_ids),
                traceparent="",
            )
        )
        record.set_block_table(page_ids)
        record.append_token(4)
        record.publish(num_computed_tokens=3)

    def run(self, seconds: float, on_tick: Callable[[], None] = lambda: None) -> list[int]:
        """Lets time pass with a tick every TICK_S; returns the leases that were to be fenced."""
        to_fence: list[int] = []
        for _ in range(round(seconds / TICK_S)):
            self.clock.advance(TICK_S)
            on_tick()
            to_fence += self.core.tick()
        return to_fence


@pytest.fixture
def adoption_wait_ms() -> int:
    """0: nobody adopts what a decode worker leaves. For tests to override."""
    return 0


@pytest.fixture
def world(tmp_path: Path, adoption_wait_ms: int) -> Iterator[World]:
    made = World(tmp_path / "arena", adoption_wait_ms=adoption_wait_ms)
    yield made
    assert made.core.integrity_errors() == ()
    made.segment.close()


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    with tempfile.TemporaryDirectory(prefix="weir-") as directory:  # pytest's own paths are too long for a socket
        made = Host(Path(directory))
        await made.start()
        yield made
        await made.close()
        assert made.shutdown_reasons == []


@pytest.fixture(params=["pages in the segment", "pages on a device"])
async def hosts(request: pytest.FixtureRequest) -> AsyncIterator[list[Host]]:
    async with open_two_hosts(on_device=request.param == "pages on a device") as made:
        yield made

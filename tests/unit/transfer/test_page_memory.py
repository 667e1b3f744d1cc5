"""An arena whose pages are on a device, here in memory of the host: claimed, handed out, kept over a restart, lost."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from opentelemetry.trace import NoOpTracer
from tests.unit.transfer.host import PretendedProcess, until

from weir.core.errors import Unavailable
from weir.core.process import ProcessIdentity
from weir.kv.layout import layout_of
from weir.kv.memory.device import HostMemory
from weir.rpc.arena.client import ArenaAccess, ArenaClient, WorkerIdentity
from weir.rpc.server import ErrorGuard, make_server
from weir.runtime.config import ConfigError
from weir_transfer.arena import claim_arena
from weir_transfer.config import TransferConfig
from weir_transfer.service import TransferService

PAGE_BYTES = 4096
NUM_PAGES = 40


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="weir-") as directory:  # pytest's own paths are too long for a socket
        yield Path(directory)


@pytest.fixture
def config(folder: Path) -> TransferConfig:
    (folder / "i").mkdir()
    return TransferConfig(
        instance="i",
        device="interpreter",
        runtime_dir=folder,
        segment_dir=folder,
        arena_bytes=NUM_PAGES * PAGE_BYTES + 100,
        page_bytes=PAGE_BYTES,
        max_context_tokens=256,
        model_digest="digest",
        num_slots=6,
        heartbeat_interval_ms=50,
        lease_ttl_ms=500,
    )


class DeviceHost:
    """A transfer service of such an arena on a socket."""

    def __init__(self, config: TransferConfig) -> None:
        self.config = config
        self.socket_path = config.instance_dir / "arena.sock"
        self.are_workers_alive = True
        self.shutdown_reasons: list[str] = []

    async def start(self) -> None:
        arena = claim_arena(self.config, self.open_process)
        self.arena_id = arena.segment.arena_id
        self.memory_server = arena.memory_server
        self.service = TransferService(
            arena, self.config.arena_settings, self.open_process, NoOpTracer(), self.shutdown_reasons.append
        )
        self._server = make_server([ErrorGuard()])
        self.service.add_to(self._server)
        self._server.add_insecure_port(f"unix:{self.socket_path}")
        await self._server.start()
        await self.service.start()

    async def stop(self) -> None:
        await self.service.stop()
        await self._server.stop(0)
        self.service.release()

    def open_process(self, identity: ProcessIdentity) -> PretendedProcess | None:
        del identity
        return PretendedProcess() if self.are_workers_alive else None

    def client(self, worker_id: str) -> ArenaClient:
        identity = WorkerIdentity(worker_id, "decode", PAGE_BYTES, "digest")
        return ArenaClient(self.socket_path, identity, print, ArenaAccess(HostMemory.open))


@pytest.fixture
async def host(config: TransferConfig) -> AsyncIterator[DeviceHost]:
    made = DeviceHost(config)
    await made.start()
    yield made
    await made.stop()


def memory_of(client: ArenaClient) -> HostMemory:
    pages = client.memory.pages
    assert isinstance(pages, HostMemory)
    return pages


async def test_all_workers_of_a_host_map_the_same_pages(host: DeviceHost) -> None:
    first, second = host.client("first"), host.client("second")
    await first.start(5)
    await second.start(5)
    memory_of(first).buffer[NUM_PAGES * PAGE_BYTES - 1] = 77
    assert memory_of(second).buffer[NUM_PAGES * PAGE_BYTES - 1] == 77
    assert first.segment.geometry.num_pages == NUM_PAGES
    taken_bytes = layout_of(first.segment.geometry).memory_bytes
    assert taken_bytes < NUM_PAGES * PAGE_BYTES, "the pages are not in the segment"
    with pytest.raises(ValueError, match="are on a device"):
        _ = first.segment.pages
    await first.close()
    await second.close()


async def test_a_restarted_service_goes_on_with_the_pages_that_its_worker_kept(host: DeviceHost) -> None:
    worker = host.client("worker")
    await worker.start(5)
    acquired = await worker.acquire(3, 1)
    memory_of(worker).buffer[acquired.page_ids[2] * PAGE_BYTES] = 7
    arena_id, lease_id = host.arena_id, worker.lease_id
    await host.stop()
    await host.start()
    assert host.arena_id == arena_id
    newcomer = host.client("newcomer")
    await newcomer.start(5)
    assert memory_of(newcomer).buffer[acquired.page_ids[2] * PAGE_BYTES] == 7
    assert (worker.lease_id, worker.lost.is_set()) == (lease_id, False)
    await worker.release(acquired.page_ids, acquired.slots)
    await worker.close()
    await newcomer.close()


async def test_a_service_begins_anew_when_no_worker_kept_the_pages(host: DeviceHost) -> None:
    worker = host.client("worker")
    await worker.start(5)
    arena_id = host.arena_id
    await host.stop()
    host.are_workers_alive = False
    await worker.close()
    await host.start()
    assert host.arena_id != arena_id
    assert host.memory_server is not None
    assert host.memory_server.has_memory


async def test_a_service_ends_when_the_last_worker_with_its_pages_goes(host: DeviceHost) -> None:
    worker = host.client("worker")
    await worker.start(5)
    await host.stop()
    await worker.close()  # it lived when the service looked, and attaches no more
    await host.start()
    await until(lambda: bool(host.shutdown_reasons))
    assert host.shutdown_reasons[0] == "the last worker that had the memory of this arena's pages is gone"


async def test_a_worker_without_a_device_is_told_why_it_gets_no_lease(host: DeviceHost) -> None:
    client = ArenaClient(host.socket_path, WorkerIdentity("w", "decode", PAGE_BYTES, "digest"), print)
    with pytest.raises(Unavailable, match="pages of its arena are on a device, and this worker computes on the CPU"):
        await client.start(5)


async def test_a_worker_waits_for_memory_and_keeps_the_lease_it_was_given(host: DeviceHost) -> None:
    assert host.memory_server is not None
    memory, host.memory_server._memory = host.memory_server._memory, None
    client = host.client("w")
    starting = asyncio.create_task(client.start(5))
    await until(lambda: client.lease_id != 0)
    lease_id = client.lease_id
    await asyncio.sleep(0.2)
    assert not starting.done()
    host.memory_server._memory = memory
    await starting
    assert client.lease_id == lease_id
    assert host.service.describe().metrics["leases"] == 1
    await client.close()


def test_an_arena_that_no_sequence_fits_into_is_refused(config: TransferConfig) -> None:
    with pytest.raises(ConfigError, match=r"arena_bytes 4096: too small .* on the device; give at least 77824"):
        claim_arena(replace(config, arena_bytes=4096), lambda identity: None)
    assert not config.segment_path.exists()

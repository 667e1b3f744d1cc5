"""A transfer service on a real Unix socket, with real clients; only the processes that hold leases are pretended."""

import asyncio
import contextlib
import functools
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from weir.core.life import Attempt
from weir.core.process import ProcessIdentity, own_identity
from weir.core.sampling import SamplingParams, StopRules
from weir.kv.arena.segment import Segment, claim_segment
from weir.kv.geometry import ArenaGeometry
from weir.kv.memory.device import HostMemory
from weir.kv.memory.page_access import PageAccess
from weir.kv.memory.server import MEMORY_SOCKET, MemoryServer
from weir.kv.records.record import SequenceParams
from weir.kv.tiers.page_header import PageLayout
from weir.rpc.arena.client import ArenaAccess, ArenaClient, HandedOff, WorkerIdentity
from weir.rpc.channel import PlainDialer
from weir.rpc.server import ErrorGuard, TraceContextGuard, make_server
from weir_transfer.arena import ClaimedArena
from weir_transfer.exchange.page_exchange import PagesPort
from weir_transfer.exchange.page_streams import StreamsPort, TcpPageStreams
from weir_transfer.messages import ArenaSettings
from weir_transfer.service import TransferService
from weir_transfer.tier_keeper import PageTier

_GEOMETRY = ArenaGeometry(page_bytes=4096, num_pages=40, num_slots=6, max_context_tokens=256)
# A client tries again after up to half a second: leases outlive that by far.
_SETTINGS = ArenaSettings(heartbeat_interval_ms=50, lease_ttl_ms=1500, prefix_wait_ms=2000, adoption_wait_ms=0)
ATTEMPT = Attempt(1, 0)

MakeTiers = Callable[[PageLayout, PageAccess], Sequence[PageTier]]


class PretendedProcess:
    """A pipe that becomes readable when the process is killed."""

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe()
        self.num_kills = 0

    def fileno(self) -> int:
        return self._read_fd

    def kill(self) -> None:
        self.num_kills += 1
        os.write(self._write_fd, b"x")

    def close(self) -> None:
        os.close(self._read_fd)
        os.close(self._write_fd)


class Host:
    """One transfer service after the other on one socket, and clients that are closed at the end."""

    def __init__(
        self,
        directory: Path,
        settings: ArenaSettings = _SETTINGS,
        *,
        exchanges_pages: bool = False,
        shown_host: str = "127.0.0.1",
        model_digest: str = "digest",
        on_device: bool = False,
        maps_memory: bool = False,
        tiers: MakeTiers | None = None,
        num_pages: int = 40,
    ) -> None:
        """`exchanges_pages`: with other hosts, which get them at `pages_address` from `start` on. `shown_host`: where
        others are told to ask for them, at the same ports; something there must pass it on. `on_device`: pages are in
        what stands for the memory of a device. `maps_memory`: of other hosts, where it can. `tiers`: where
        pages outlive the arena."""
        self._on_device = on_device
        self._open_memory = HostMemory.open_to_read if maps_memory else None
        self._shown_host = shown_host
        self._model_digest = model_digest
        self._geometry = replace(_GEOMETRY, num_pages=num_pages, pages_on_device=on_device)
        self._tiers = tiers
        self._settings = settings
        self._exchanges_pages = exchanges_pages
        self.pages_address = ""
        self.socket_path = directory / "arena.sock"
        self.segment_path = directory / "arena"
        self.spans = InMemorySpanExporter()
        self.processes: list[PretendedProcess] = []
        self.is_process_there = True
        self.shutdown_reasons: list[str] = []
        self._provider = TracerProvider(shutdown_on_exit=False)
        self._provider.add_span_processor(SimpleSpanProcessor(self.spans))
        self._clients: list[ArenaClient] = []

    async def start(self) -> None:
        segment = claim_segment(self.segment_path, self._geometry, self._model_digest).segment
        arena = ClaimedArena(segment, self._device_memory(segment) if self._on_device else None)
        tracer = self._provider.get_tracer("test")
        self.service = TransferService(arena, self._settings, self._open_process, tracer, self.shutdown_reasons.append)
        self._server = make_server([TraceContextGuard(tracer), ErrorGuard()])
        if self._exchanges_pages:
            number = self._server.add_insecure_port("127.0.0.1:0")
            self.pages_address = f"{self._shown_host}:{number}"
            self.service.exchange_pages(self._pages_port())
        if self._tiers is not None:
            layout = PageLayout(self._model_digest, _GEOMETRY.page_bytes)
            self.service.keep_pages(self._tiers(layout, arena.pages))
        self.service.add_to(self._server)
        self._server.add_insecure_port(f"unix:{self.socket_path}")
        await self._server.start()
        await self.service.start()

    def _pages_port(self) -> PagesPort:
        open_streams = functools.partial(TcpPageStreams, StreamsPort("test", "127.0.0.1"))
        return PagesPort(self.pages_address, PlainDialer(), open_streams, self._open_memory)

    def _device_memory(self, segment: Segment) -> MemoryServer:
        num_bytes = self._geometry.page_memory_bytes
        path = self.socket_path.with_name(MEMORY_SOCKET)
        return MemoryServer(path, segment.arena_id, num_bytes, HostMemory.open, HostMemory.create(num_bytes))

    async def stop(self) -> None:
        await self.service.stop()
        await self._server.stop(0)
        self.service.release()

    async def client(self, worker_id: str, on_handed_off: Callable[[HandedOff], None] = print) -> ArenaClient:
        identity = WorkerIdentity(worker_id, "decode", 4096, self._model_digest)
        access = ArenaAccess(HostMemory.open if self._on_device else None)
        made = ArenaClient(self.socket_path, identity, on_handed_off, access)
        await made.start(5)
        self._clients.append(made)
        return made

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        await until(lambda: self.metric("leases") == 0)
        await self.until_nothing_is_passed()
        assert self.service.describe().integrity_errors == ()
        assert self.metric("free_pages") + self.metric("cached_pages") == self._geometry.num_pages
        await self.stop()
        assert not self.segment_path.exists()

    async def until_nothing_is_passed(self) -> None:
        """A match that has waited long enough leaves its fetch behind, and a call ends here after it ended there."""
        await until(lambda: self.metric("remote_pages_reserved") == self.metric("remote_pages_pinned") == 0)

    def metric(self, name: str) -> float:
        return self.service.describe().metrics[name]

    def tracer_span(self, name: str) -> contextlib.AbstractContextManager[object]:
        return self._provider.get_tracer("test").start_as_current_span(name)

    def _open_process(self, identity: ProcessIdentity) -> PretendedProcess | None:
        assert identity == own_identity()
        if not self.is_process_there:
            return None
        self.processes.append(PretendedProcess())
        return self.processes[-1]


async def until(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for is known to another task
            await asyncio.sleep(0.01)


def write_sequence(client: ArenaClient, slot: int, page_ids: tuple[int, ...], request_id: str = "r1") -> None:
    record = client.segment.record(slot)
    params = SequenceParams(
        request_id, ATTEMPT, "gateway-0", (1, 2, 3), SamplingParams(), StopRules(max_tokens=8), len(page_ids), ""
    )
    record.begin(params)
    record.set_block_table(page_ids)
    record.append_token(4)
    record.publish(num_computed_tokens=3)


def memory_of(client: ArenaClient) -> NDArray[np.uint8]:
    """All pages, as the worker maps them."""
    on_device = client.memory.pages
    if on_device is None:
        return client.segment.pages
    assert isinstance(on_device, HostMemory)
    return np.frombuffer(on_device.buffer, np.uint8).reshape(-1, 4096)


@contextlib.asynccontextmanager
async def open_two_hosts(**how: bool) -> AsyncIterator[list[Host]]:
    """That exchange pages, as `how` says more. At the end nothing is reserved or pinned at either."""
    async with contextlib.AsyncExitStack() as stack:
        made = []
        for _ in range(2):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="weir-"))
            host = Host(Path(folder), exchanges_pages=True, **how)  # type: ignore[arg-type]
            await host.start()
            stack.push_async_callback(host.close)
            made.append(host)
        yield made
        for host in made:
            assert host.shutdown_reasons == []
            await host.until_nothing_is_passed()

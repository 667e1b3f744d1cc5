"""Who is asked for a page of metrics, for how long, and by whom it is found."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc.aio
from tests.unit.gateway.fake_scheduler import INSTANCE
from tests.unit.gateway.metrics.test_page import served, worker_at
from tests.unit.gateway.world import open_world
from tests.unit.hubs import made_hub

from weir.bus.codec import encode
from weir.bus.in_memory import InMemoryBus
from weir.bus.messages import WorkerRecord
from weir.bus.subjects import WORKER_TTL_S, Subjects
from weir.core.addresses import LOOPBACK
from weir.core.clock import ManualClock
from weir.rpc.channel import PlainDialer
from weir.rpc.identities import Party
from weir.rpc.server import make_server
from weir.runtime.admin import AdminService, Description, Identity
from weir.wire.v1 import admin_pb2_grpc
from weir_gateway.metrics.neighbours import AskBounds, NeighbourWatch

SUBJECTS = Subjects(INSTANCE)


class Silent(AdminService):
    """A process that is reached and never answers."""

    def __init__(self) -> None:
        super().__init__(Identity("prefill", "silent-0", "bytes"), Description)
        self.address = ""
        self.was_reached = asyncio.Event()

    async def Describe(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        del request, context
        self.was_reached.set()
        await asyncio.Event().wait()


@asynccontextmanager
async def silent() -> AsyncIterator[Silent]:
    process, server = Silent(), make_server()
    admin_pb2_grpc.add_AdminServicer_to_server(process, server)
    process.address = f"{LOOPBACK}:{server.add_insecure_port(f'{LOOPBACK}:0')}"
    await server.start()
    try:
        yield process
    finally:
        await server.stop(None)


async def register(bus: InMemoryBus, *records: WorkerRecord) -> None:
    workers = await bus.bucket(SUBJECTS.workers_bucket, ttl_s=WORKER_TTL_S)
    for record in records:
        await workers.put(record.worker_id, encode(record))


async def test_who_has_answered_is_there_although_others_take_too_long() -> None:
    bus = made_hub(INSTANCE).connect()
    bounds = AskBounds(max_at_once=2, call_timeout_s=60.0, total_timeout_s=0.5)
    async with silent() as process, served("prefill", Description({"steps_total": 9.0})) as address:
        await register(
            bus,
            worker_at(process.address, "silent-0", ""),
            worker_at(address, "prefill-0-cc", ""),
            *(worker_at(process.address, f"silent-{index}", "") for index in range(1, 9)),
        )
        watch = NeighbourWatch(bus, SUBJECTS, PlainDialer(), ManualClock(), bounds)
        async with asyncio.timeout(20):
            found = await watch.neighbours()
        await watch.close()
    assert [(record.worker_id, described.metrics) for record, described in found.workers] == [
        ("prefill-0-cc", {"steps_total": 9.0})
    ]


async def test_a_scrape_makes_nobody_check_itself() -> None:
    checks = []

    def check_integrity() -> list[str]:
        checks.append(1)
        return []

    bus = made_hub(INSTANCE).connect()
    async with served("prefill", Description({"steps_total": 9.0}, check_integrity)) as address:
        await register(bus, worker_at(address, "prefill-0-cc", ""))
        watch = NeighbourWatch(bus, SUBJECTS, PlainDialer(), ManualClock())
        assert len((await watch.neighbours()).workers) == 1
        await watch.close()
    assert checks == []


async def test_transfer_services_of_all_hosts_are_found_where_others_reach_them() -> None:
    """Their sockets have one name."""
    bus = made_hub(INSTANCE).connect()
    arenas = [Description({"total_pages": pages}) for pages in (10.0, 20.0)]
    async with served("transfer", arenas[0]) as here, served("transfer", arenas[1]) as there:
        records = [
            replace(worker_at("127.0.0.1:1", f"w{number}", "unix:/run/arena.sock"), pages_address=address)
            for number, address in enumerate((here, there))
        ]
        await register(bus, *records)
        watch = NeighbourWatch(bus, SUBJECTS, PlainDialer(), ManualClock())
        others = (await watch.neighbours()).others
        await watch.close()
    assert sorted(one.metrics["total_pages"] for one in others) == [10.0, 20.0]


async def test_buckets_are_opened_once_however_many_scrape() -> None:
    bus, clock = made_hub(INSTANCE).connect(), ManualClock()
    opened = []
    open_bucket = bus.open_bucket

    async def counted(name: str) -> Any:
        opened.append(name)
        return await open_bucket(name)

    bus.open_bucket = counted  # type: ignore[method-assign]
    watch = NeighbourWatch(bus, SUBJECTS, PlainDialer(), clock)
    for _ in range(3):
        await watch.neighbours()
        clock.advance(2.0)
    assert sorted(opened) == sorted([SUBJECTS.workers_bucket, SUBJECTS.leader_bucket])
    await watch.close()


async def test_a_scrape_that_is_under_way_is_answered_before_the_gateway_ends() -> None:
    async with silent() as process:
        async with open_world() as world:
            await register(world.hub.connect(), worker_at(process.address, "silent-0", ""))
            http = world.http_client(timeout=30)
            scraping = asyncio.create_task(http.get("/metrics"))
            await process.was_reached.wait()
        assert (await scraping).status_code == 200
        await http.aclose()


class RenewedDialer(PlainDialer):
    """Of a process whose certificate changes; counts the channels that it opens."""

    def __init__(self) -> None:
        self.version = 0
        self.num_opened = 0

    def open(self, address: str, party: Party) -> grpc.aio.Channel:
        self.num_opened += 1
        return super().open(address, party)


async def test_channels_are_opened_again_with_a_new_certificate_and_else_kept() -> None:
    bus, clock, dialer = made_hub(INSTANCE).connect(), ManualClock(), RenewedDialer()
    async with served("prefill", Description({"steps_total": 9.0})) as address:
        await register(bus, worker_at(address, "prefill-0-cc", ""))
        watch = NeighbourWatch(bus, SUBJECTS, dialer, clock)
        opened = []
        for version in (0, 0, 1, 1):
            dialer.version = version
            assert len((await watch.neighbours()).workers) == 1
            opened.append(dialer.num_opened)
            clock.advance(2.0)
        await watch.close()
    assert opened == [1, 1, 2, 2]

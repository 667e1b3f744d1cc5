"""The scheduler over either bus, through the death of its server."""

import asyncio
from collections.abc import Awaitable, Callable, Container

from opentelemetry import trace
from tests.contract.worlds import BusWorld, eventually
from tests.unit.scheduler.rig import make_limits, make_worker
from tests.unit.scheduler.scripted import SUBJECTS, ScriptedGateway

from weir.bus.codec import encode
from weir.bus.endpoint import BusEndpoint
from weir.bus.protocol import Bus, BusError
from weir.bus.queue_report import QueueReport
from weir.bus.subjects import WORKER_TTL_S
from weir.core.clock import SystemClock
from weir.core.tasks import end_tasks
from weir_scheduler.component import SchedulerComponent, SchedulerSettings

Connect = Callable[[], Awaitable[Bus]]


def make_scheduler(
    connect: Connect, scheduler_id: str, shutdowns: list[str], gather_s: float = 0.2
) -> SchedulerComponent:
    return SchedulerComponent(
        connect,
        scheduler_id,
        SchedulerSettings("test", make_limits(gather_s=gather_s)),
        tracer=trace.NoOpTracer(),
        clock=SystemClock(),
        request_shutdown=shutdowns.append,
    )


async def keep_workers(bus: Bus, silent: Container[str] = ()) -> None:
    """A prefill and a decode worker that live; the registry does not hear the silent ones."""
    while True:
        try:
            bucket = await bus.bucket(SUBJECTS.workers_bucket, ttl_s=WORKER_TTL_S)
            for record in (make_worker("p", "prefill"), make_worker("d", "decode")):
                if record.worker_id not in silent:
                    await bucket.put(record.worker_id, encode(record))
        except BusError:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)


async def test_requests_are_granted_before_and_after_the_server_dies(connect: Connect, world: BusWorld) -> None:
    shutdowns: list[str] = []
    scheduler = make_scheduler(connect, "s0", shutdowns)
    workers = asyncio.create_task(keep_workers(await connect()))
    gateway = ScriptedGateway(await connect(), "g0", trace.NoOpTracer())
    try:
        await scheduler.start()
        await gateway.start()
        await gateway.submit("before")
        await eventually(lambda: gateway.grants != [])
        world.stop_server()
        submitting = asyncio.create_task(gateway.submit("during"))
        await asyncio.sleep(0.3)
        assert not submitting.done()
        world.start_server()
        await asyncio.wait_for(submitting, 10)
        await eventually(lambda: gateway.granted_ids == ["before", "during"])
        for request_id in ("before", "during"):
            await gateway.finish(request_id)
        await eventually(lambda: scheduler.describe().metrics["granted"] == 0)
        assert (gateway.ends, shutdowns) == ({"before": "finished", "during": "finished"}, [])
        assert scheduler.describe().integrity_errors == ()
    finally:
        await gateway.stop()
        await scheduler.stop()
        await end_tasks([workers])


async def test_a_worker_that_only_the_registry_does_not_hear_keeps_its_requests(connect: Connect) -> None:
    shutdowns: list[str] = []
    silent: set[str] = set()
    scheduler = make_scheduler(connect, "s0", shutdowns)
    workers = asyncio.create_task(keep_workers(await connect(), silent))
    gateway = ScriptedGateway(await connect(), "g0", trace.NoOpTracer())
    try:
        await scheduler.start()
        await gateway.start()
        await gateway.submit("a")
        await eventually(lambda: gateway.grants != [])
        silent.add("d")
        await eventually(lambda: scheduler.describe().metrics["workers"] == 1)
        await asyncio.sleep(0.5)
        assert (gateway.ends, scheduler.describe().metrics["reserved_pages"]) == ({}, 2)
        await gateway.finish("a")
        await eventually(lambda: scheduler.describe().metrics["reserved_pages"] == 0)
        assert (gateway.ends, shutdowns) == ({"a": "finished"}, [])
    finally:
        await gateway.stop()
        await scheduler.stop()
        await end_tasks([workers])


async def test_gateways_hear_of_what_waits_also_after_the_server_was_away(connect: Connect, world: BusWorld) -> None:
    shutdowns: list[str] = []
    # While it gathers, nobody asks for workers: the request waits until the test has seen it.
    scheduler = make_scheduler(connect, "s0", shutdowns, gather_s=60)
    gateway = ScriptedGateway(await connect(), "g0", trace.NoOpTracer())
    listening = BusEndpoint(await connect(), trace.NoOpTracer())
    reports: list[QueueReport] = []

    async def on_report(report: QueueReport) -> None:
        reports.append(report)

    def num_heard() -> list[int]:
        return [lane.num_queued for lane in reports[-1].lanes] if reports else []

    try:
        await listening.serve(SUBJECTS.queues, QueueReport, on_report)
        await scheduler.start()
        await gateway.start()
        await gateway.submit("waits")
        await eventually(lambda: num_heard() == [1])
        world.stop_server()
        await asyncio.sleep(0.3)
        reports.clear()
        world.start_server()
        await eventually(lambda: len(reports) > 0)
        assert shutdowns == []
    finally:
        await gateway.stop()
        await listening.close()
        await scheduler.stop()

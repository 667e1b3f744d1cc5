"""The registration: there while the worker lives, whatever the bus does."""

import asyncio
from collections.abc import Callable

import pytest

from weir.bus.codec import decode
from weir.bus.memory import MemoryHub
from weir.bus.messages import WorkerRecord
from weir.bus.protocol import Bus, BusUnavailable
from weir.bus.subjects import Subjects
from weir.core.errors import Unavailable
from weir.worker.registry import Registration

SUBJECTS = Subjects("registry")


def record(num_running: int) -> WorkerRecord:
    return WorkerRecord(
        worker_id="decode-0-00000000",
        role="decode",
        model="hash",
        address="127.0.0.1:1",
        host_id="host",
        max_context_tokens=100,
        page_tokens=16,
        num_arena_pages=10,
        max_num_seqs=8,
        num_running=num_running,
        num_waiting=0,
    )


def registration(hub: MemoryHub, num_running: Callable[[], int] = lambda: 0) -> Registration:
    async def connect() -> Bus:
        if not hub.is_up:
            raise BusUnavailable("the hub is down")
        return hub.connect()

    return Registration(connect, SUBJECTS, lambda: record(num_running()))


async def entries(hub: MemoryHub) -> list[WorkerRecord]:
    bucket = await hub.connect().bucket(SUBJECTS.workers_bucket, ttl_s=3.0)
    return [decode(WorkerRecord, entry.value) for entry in await bucket.list_entries() if entry.value is not None]


async def test_it_is_there_after_start_and_gone_after_stop() -> None:
    hub = MemoryHub()
    registering = registration(hub)
    await registering.start(1.0)
    assert await entries(hub) == [record(0)]
    await registering.stop()
    assert await entries(hub) == []


async def test_a_change_is_put_at_once_when_asked() -> None:
    hub = MemoryHub()
    loads = iter(range(100))
    registering = registration(hub, lambda: next(loads))
    await registering.start(1.0)
    registering.put_now()
    await asyncio.sleep(0.05)
    assert [entry.num_running for entry in await entries(hub)] == [1]
    await registering.stop()


async def test_without_a_bus_the_worker_does_not_start() -> None:
    hub = MemoryHub()
    hub.stop()
    registering = registration(hub)
    with pytest.raises(Unavailable, match="is NATS running"):
        await registering.start(0.05)
    assert registering.num_failures == 1
    await registering.stop()


async def test_it_survives_the_loss_of_the_bus() -> None:
    hub = MemoryHub()
    registering = registration(hub)
    await registering.start(1.0)
    hub.stop()
    registering.put_now()
    await asyncio.sleep(0.05)
    assert registering.num_failures == 1
    hub.start()
    registering.put_now()
    async with asyncio.timeout(5):
        while not await entries(hub):  # noqa: ASYNC110 - a bucket has no event
            await asyncio.sleep(0.02)
    await registering.stop()

"""The registration: there while the worker lives, whatever the bus does."""

import asyncio
from collections.abc import Callable

import pytest

from weir.bus.codec import decode
from weir.bus.in_memory import InMemoryHub
from weir.bus.messages import WorkerRecord
from weir.bus.protocol import Bus, BusUnavailable
from weir.bus.subjects import Subjects
from weir.core.errors import Unavailable
from weir.worker.registry import RegistryEntry

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


def registration(hub: InMemoryHub, num_running: Callable[[], int] = lambda: 0) -> RegistryEntry:
    async def connect() -> Bus:
        if not hub.is_up:
            raise BusUnavailable("the hub is down")
        return hub.connect()

    return RegistryEntry(connect, SUBJECTS, lambda: record(num_running()))


async def entries(hub: InMemoryHub) -> list[WorkerRecord]:
    bucket = await hub.connect().bucket(SUBJECTS.workers_bucket, ttl_s=3.0)
    return [decode(WorkerRecord, entry.value) for entry in await bucket.list_entries() if entry.value is not None]


async def test_it_is_there_after_start_and_gone_after_stop() -> None:
    hub = InMemoryHub()
    registering = registration(hub)
    await registering.start(1.0)
    assert await entries(hub) == [record(0)]
    await registering.stop()
    assert await entries(hub) == []


async def test_a_change_is_put_at_once_when_asked() -> None:
    hub = InMemoryHub()
    loads = iter(range(100))
    registering = registration(hub, lambda: next(loads))
    await registering.start(1.0)
    registering.put_now()
    await asyncio.sleep(0.05)
    assert [entry.num_running for entry in await entries(hub)] == [1]
    await registering.stop()


async def test_without_a_bus_the_worker_does_not_start() -> None:
    hub = InMemoryHub()
    hub.stop()
    registering = registration(hub)
    with pytest.raises(Unavailable, match="is NATS running"):
        await registering.start(0.05)
    assert registering.num_failures == 1
    await registering.stop()


async def test_it_survives_the_loss_of_the_bus() -> None:
    hub = InMemoryHub()
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


class _HoldingBus:
    """Delays `close` for ever, as a client does whose server has gone."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.bucket = bus.bucket

    async def close(self) -> None:
        await asyncio.Event().wait()


async def test_a_bus_that_does_not_close_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = InMemoryHub()
    monkeypatch.setattr("weir.worker.registry._CALL_TIMEOUT_S", 0.05)

    async def connect() -> Bus:
        return _HoldingBus(hub.connect())  # type: ignore[return-value]

    registering = RegistryEntry(connect, SUBJECTS, lambda: record(0))
    await registering.start(1.0)
    async with asyncio.timeout(1):
        await registering.stop()
    assert await entries(hub) == []


async def test_stopping_ends_a_put_that_swallows_its_cancellation() -> None:
    """As asyncio.wait_for does until Python 3.12 when the answer comes in the same moment."""
    hub = InMemoryHub()
    entered = asyncio.Event()

    async def connect() -> Bus:
        entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return hub.connect()
        raise AssertionError("cancelled only")

    registering = RegistryEntry(connect, SUBJECTS, lambda: record(0))
    starting = asyncio.create_task(registering.start(30.0))
    await entered.wait()
    async with asyncio.timeout(3):
        await registering.stop()
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)


async def test_a_record_that_could_not_be_made_once_is_put_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.worker.registry._INTERVAL_S", 0.01)
    defects = [RuntimeError("a defect")]

    def num_running() -> int:
        if defects:
            raise defects.pop()
        return 3

    hub = InMemoryHub()
    registering = registration(hub, num_running)
    await registering.start(5.0)
    assert await entries(hub) == [record(3)]
    assert registering.num_failures == 1
    await registering.stop()

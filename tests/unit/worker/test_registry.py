"""The registration: there while the worker lives, whatever the bus does."""

import asyncio
import contextlib
from collections.abc import Callable

import pytest

from weir.bus.codec import decode
from weir.bus.in_memory import InMemoryHub
from weir.bus.messages import WorkerRecord
from weir.bus.protocol import Bus, KvBucket
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


def entry_of(num_running: Callable[[], int] = lambda: 0) -> RegistryEntry:
    return RegistryEntry(SUBJECTS, lambda: record(num_running()))


async def entries(hub: InMemoryHub) -> list[WorkerRecord]:
    bucket = await hub.connect().bucket(SUBJECTS.workers_bucket, ttl_s=3.0)
    return [decode(WorkerRecord, entry.value) for entry in await bucket.list_entries() if entry.value is not None]


async def test_it_is_there_after_start_and_gone_after_stop() -> None:
    hub = InMemoryHub()
    entry = entry_of()
    await entry.start(hub.connect(), 1.0)
    assert await entries(hub) == [record(0)]
    await entry.stop()
    assert await entries(hub) == []


async def test_a_change_is_put_at_once_when_asked() -> None:
    hub = InMemoryHub()
    loads = iter(range(100))
    entry = entry_of(lambda: next(loads))
    await entry.start(hub.connect(), 1.0)
    entry.put_now()
    await asyncio.sleep(0.05)
    assert [found.num_running for found in await entries(hub)] == [1]
    await entry.stop()


async def test_a_bus_that_is_down_for_too_long_is_an_error() -> None:
    hub = InMemoryHub()
    hub.stop()
    entry = entry_of()
    with pytest.raises(Unavailable, match="is NATS running"):
        await entry.start(hub.connect(), 0.05)
    assert entry.num_failures == 1
    await entry.stop()


async def test_it_survives_the_loss_of_the_bus() -> None:
    hub = InMemoryHub()
    entry = entry_of()
    await entry.start(hub.connect(), 1.0)
    hub.stop()
    entry.put_now()
    await asyncio.sleep(0.05)
    assert entry.num_failures == 1
    hub.start()
    entry.put_now()
    async with asyncio.timeout(5):
        while not await entries(hub):  # noqa: ASYNC110 - a bucket has no event
            await asyncio.sleep(0.02)
    await entry.stop()


class SwallowingBus:
    """Its first `bucket` waits until it is cancelled, and returns then."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.entered = asyncio.Event()

    async def bucket(self, name: str, *, ttl_s: float | None = None, durable: bool = False) -> KvBucket:
        self.entered.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return await self._bus.bucket(name, ttl_s=ttl_s, durable=durable)


async def test_stopping_ends_a_put_that_swallows_its_cancellation() -> None:
    """As asyncio.wait_for does until Python 3.12 when the answer comes in the same moment."""
    hub = InMemoryHub()
    bus = SwallowingBus(hub.connect())
    entry = entry_of()
    starting = asyncio.create_task(entry.start(bus, 30.0))  # type: ignore[arg-type]
    await bus.entered.wait()
    async with asyncio.timeout(3):
        await entry.stop()
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    assert await entries(hub) == []


async def test_a_record_that_could_not_be_made_once_is_put_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.worker.registry._INTERVAL_S", 0.01)
    defects = [RuntimeError("a defect")]

    def num_running() -> int:
        if defects:
            raise defects.pop()
        return 3

    hub = InMemoryHub()
    entry = entry_of(num_running)
    await entry.start(hub.connect(), 5.0)
    assert await entries(hub) == [record(3)]
    assert entry.num_failures == 1
    await entry.stop()

"""A worker on the bus: registered while it lives, with the policy of the scheduler, over one connection."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from tests.unit.hubs import made_hub
from tests.unit.worker.rig import INSTANCE, Rig, eventually, running_rig

from weir.bus.codec import decode, encode
from weir.bus.configuration import POLICY_KEY, PolicyChoice
from weir.bus.in_memory import InMemoryBus, InMemoryHub
from weir.bus.messages import WorkerRecord
from weir.bus.protocol import Bus, BusUnavailable, KvBucket
from weir.bus.subjects import WORKER_TTL_S, Subjects
from weir.core.errors import Unavailable
from weir.engine.loop import InboxFull
from weir.engine.messages import Command, SetPolicy
from weir.policy.seams import Policy
from weir.worker.bus_link import PolicyWatch, RegistryEntry

SUBJECTS = Subjects("link")
RIG_SUBJECTS = Subjects(INSTANCE)


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


async def entries(hub: InMemoryHub, subjects: Subjects = SUBJECTS) -> list[WorkerRecord]:
    bucket = await hub.connect().bucket(subjects.workers_bucket, ttl_s=WORKER_TTL_S)
    return [decode(WorkerRecord, entry.value) for entry in await bucket.list_entries() if entry.value is not None]


async def test_it_is_there_after_start_and_gone_after_stop() -> None:
    hub = made_hub("link")
    entry = entry_of()
    await entry.start(hub.connect(), 1.0)
    assert await entries(hub) == [record(0)]
    await entry.stop()
    assert await entries(hub) == []


async def test_a_change_is_put_at_once_when_asked() -> None:
    hub = made_hub("link")
    loads = iter(range(100))
    entry = entry_of(lambda: next(loads))
    await entry.start(hub.connect(), 1.0)
    entry.put_now()
    await asyncio.sleep(0.05)
    assert [found.num_running for found in await entries(hub)] == [1]
    await entry.stop()


async def test_a_bus_that_is_down_for_too_long_is_an_error() -> None:
    hub = made_hub("link")
    hub.stop()
    entry = entry_of()
    with pytest.raises(Unavailable, match="do NATS and a scheduler run"):
        await entry.start(hub.connect(), 0.05)
    assert entry.num_failures == 1
    await entry.stop()


async def test_it_survives_the_loss_of_the_bus() -> None:
    hub = made_hub("link")
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
    """Its first `open_bucket` waits until it is cancelled, and returns then."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.entered = asyncio.Event()

    async def open_bucket(self, name: str) -> KvBucket:
        self.entered.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return await self._bus.open_bucket(name)


async def test_stopping_ends_a_put_that_swallows_its_cancellation() -> None:
    """As asyncio.wait_for does until Python 3.12 when the answer comes in the same moment."""
    hub = made_hub("link")
    bus = SwallowingBus(hub.connect())
    entry = entry_of()
    starting = asyncio.create_task(entry.start(bus, 30.0))  # type: ignore[arg-type]
    await bus.entered.wait()
    async with asyncio.timeout(15):
        await entry.stop()
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    assert await entries(hub) == []


async def test_a_record_that_could_not_be_made_once_is_put_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.worker.bus_link._INTERVAL_S", 0.01)
    defects = [RuntimeError("a defect")]

    def num_running() -> int:
        if defects:
            raise defects.pop()
        return 3

    hub = made_hub("link")
    entry = entry_of(num_running)
    await entry.start(hub.connect(), 5.0)
    assert await entries(hub) == [record(3)]
    assert entry.num_failures == 1
    await entry.stop()


async def write_choice(hub: InMemoryHub, choice: PolicyChoice | bytes, subjects: Subjects = SUBJECTS) -> None:
    bus = hub.connect()
    bucket = await bus.bucket(subjects.configuration_bucket, durable=True)
    await bucket.put(POLICY_KEY, choice if isinstance(choice, bytes) else encode(choice))
    await bus.close()


@asynccontextmanager
async def watching(hub: InMemoryHub, take: Callable[[Policy], None]) -> AsyncIterator[PolicyWatch]:
    watch = PolicyWatch(SUBJECTS, take)
    watch.start(hub.connect())
    yield watch
    await watch.stop()


def names(policies: list[Policy]) -> list[str]:
    return [policy.name for policy in policies]


async def test_the_present_choice_and_each_later_one_are_taken() -> None:
    hub, taken = made_hub("link"), list[Policy]()
    await write_choice(hub, PolicyChoice(1, "fcfs"))
    async with watching(hub, taken.append):
        await eventually(lambda: names(taken) == ["fcfs"])
        await write_choice(hub, PolicyChoice(1, "slai:default_itl_s=0.1"))
        await eventually(lambda: names(taken) == ["fcfs", "slai"])
    hub.stop()


async def test_a_choice_that_comes_again_is_taken_once() -> None:
    hub, taken = made_hub("link"), list[Policy]()
    async with watching(hub, taken.append):
        await write_choice(hub, PolicyChoice(1, "edf"))
        await eventually(lambda: names(taken) == ["edf"])
        await write_choice(hub, PolicyChoice(2, "edf"))
        await asyncio.sleep(0.05)
        await write_choice(hub, PolicyChoice(2, "fcfs"))
        await eventually(lambda: names(taken) == ["edf", "fcfs"])
    hub.stop()


async def test_the_choice_of_a_scheduler_that_was_replaced_is_not_taken() -> None:
    hub, taken = made_hub("link"), list[Policy]()
    async with watching(hub, taken.append):
        await write_choice(hub, PolicyChoice(5, "edf"))
        await eventually(lambda: names(taken) == ["edf"])
        await write_choice(hub, PolicyChoice(4, "fcfs"))
        await asyncio.sleep(0.05)  # it would be overwritten before it is seen
        await write_choice(hub, PolicyChoice(6, "srtf"))
        await eventually(lambda: names(taken) == ["edf", "srtf"])
    hub.stop()


async def test_a_choice_that_cannot_be_taken_is_counted_and_changes_nothing() -> None:
    hub, taken = made_hub("link"), list[Policy]()
    async with watching(hub, taken.append) as watch:
        await write_choice(hub, PolicyChoice(1, "edf"))
        await eventually(lambda: names(taken) == ["edf"])
        await write_choice(hub, PolicyChoice(1, "no-such-policy"))
        await eventually(lambda: watch.metrics()["policy_choices_refused_total"] == 1)
        await write_choice(hub, b"\xc1")
        await eventually(lambda: watch.metrics()["policy_choices_refused_total"] == 2)
        assert names(taken) == ["edf"]
    hub.stop()


def takes_after(errors: list[Exception], taken: list[Policy]) -> Callable[[Policy], None]:
    def take(policy: Policy) -> None:
        if errors:
            raise errors.pop()
        taken.append(policy)

    return take


async def test_a_choice_that_the_engine_had_no_room_for_is_taken_later() -> None:
    hub, taken = made_hub("link"), list[Policy]()
    async with watching(hub, takes_after([InboxFull("full"), InboxFull("full")], taken)):
        await write_choice(hub, PolicyChoice(1, "edf"))
        await eventually(lambda: names(taken) == ["edf"])
    hub.stop()


async def test_changes_are_taken_after_the_bus_was_away() -> None:
    hub, taken = made_hub("link"), list[Policy]()
    async with watching(hub, taken.append):
        await write_choice(hub, PolicyChoice(1, "edf"))
        await eventually(lambda: names(taken) == ["edf"])
        hub.stop()
        await asyncio.sleep(0.05)
        hub.start()
        await write_choice(hub, PolicyChoice(1, "fcfs"))
        await eventually(lambda: names(taken)[-1:] == ["fcfs"])
    hub.stop()


async def test_a_worker_that_starts_without_a_bus_takes_the_choice_later() -> None:
    hub, taken = made_hub("link"), list[Policy]()
    hub.stop()
    async with watching(hub, taken.append):
        await asyncio.sleep(0.05)
        hub.start()
        await write_choice(hub, PolicyChoice(1, "edf"))
        await eventually(lambda: names(taken) == ["edf"])
    hub.stop()


async def test_a_defect_is_counted_and_the_choice_is_taken_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.bus.configuration._RETRY_S", 0.01)
    hub, taken = made_hub("link"), list[Policy]()
    async with watching(hub, takes_after([RuntimeError("a defect")], taken)) as watch:
        await write_choice(hub, PolicyChoice(1, "edf"))
        await eventually(lambda: names(taken) == ["edf"])
        assert watch.metrics()["policy_watch_failures_total"] == 1
    hub.stop()


def given_policies(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of those that engines get from now on."""
    given: list[str] = []
    for worker in rig.workers:
        host = worker.shell._host

        def post(command: Command, post: Callable[[Command], None] = host.post) -> None:
            if isinstance(command, SetPolicy):
                given.append(command.policy.name)
            post(command)

        monkeypatch.setattr(host, "post", post)
    return given


async def registered(rig: Rig) -> set[str]:
    return {found.worker_id for found in await entries(rig.hub, RIG_SUBJECTS)}


async def test_registry_and_policy_share_a_connection_that_ends_with_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_rig() as rig:
        given = given_policies(rig, monkeypatch)
        await write_choice(rig.hub, PolicyChoice(1, "edf"), RIG_SUBJECTS)
        await eventually(lambda: given == ["edf"] * len(rig.workers))
        assert await registered(rig) == {worker.worker_id for worker in rig.workers}
        buses = [bus for worker in rig.workers for bus in worker.buses]
        assert len(buses) == len(rig.workers)
        assert not any(bus.is_closed for bus in buses)
    assert all(bus.is_closed for bus in buses)


async def test_after_an_outage_both_go_on_over_the_same_connection(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    given = given_policies(rig, monkeypatch)
    await write_choice(rig.hub, PolicyChoice(1, "edf"), RIG_SUBJECTS)
    await eventually(lambda: given == ["edf"] * len(rig.workers))
    rig.hub.stop()
    await eventually(lambda: all(worker.metrics()["registry_failures_total"] for worker in rig.workers))
    rig.hub.start()
    assert await registered(rig) == set(), "the server came back without what was not durable"
    await write_choice(rig.hub, PolicyChoice(1, "fcfs"), RIG_SUBJECTS)
    await eventually(lambda: given[len(rig.workers) :] == ["fcfs"] * len(rig.workers))
    async with asyncio.timeout(5):
        while len(await registered(rig)) < len(rig.workers):  # noqa: ASYNC110 - a bucket has no event
            await asyncio.sleep(0.02)
    assert [len(worker.buses) for worker in rig.workers] == [1, 1]


async def test_a_bus_that_does_not_close_holds_no_worker_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a client does whose server has gone."""

    async def close(bus: InMemoryBus) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("weir.worker.bus_link._CLOSE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(InMemoryBus, "close", close)
    async with running_rig() as rig:
        pass
    assert rig.arena.num_free_pages == rig.arena.segment.geometry.num_pages


async def test_without_a_bus_a_worker_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(hub: InMemoryHub) -> InMemoryBus:
        raise BusUnavailable("no NATS server answers")

    monkeypatch.setattr(InMemoryHub, "connect", connect)
    with pytest.raises(Unavailable, match="no NATS server answers"):
        async with running_rig():
            pass


async def test_the_entry_may_be_put_again_by_a_worker_that_has_let_go_of_the_arena_already(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_rig() as rig:
        worker = rig.decode
        close = worker.arena.close

        async def close_and_put() -> None:
            await close()
            worker.shell._bus_link.put_now()
            await asyncio.sleep(0.05)

        monkeypatch.setattr(worker.arena, "close", close_and_put)
        rig.workers.remove(worker)
        await worker.shell.drain(0.5)
        await worker.shell.stop()
        await worker.server.stop(None)
        assert worker.worker_id not in await registered(rig)
        assert worker.metrics()["registry_failures_total"] == 0
    assert "not in the registry" not in caplog.text

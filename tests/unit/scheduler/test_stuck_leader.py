"""A leader whose key cannot be written although the server is there, and one that meets a failing bus as it begins."""

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest
from tests.unit.scheduler.keeping import Served
from tests.unit.scheduler.scripted import SUBJECTS, Stack, eventually

from weir.bus.endpoint import BusEndpoint
from weir.bus.in_memory import InMemoryBus, InMemoryHub
from weir.bus.in_memory_kv import InMemoryBucket
from weir.bus.messages import LEADER_KEY, Cancel, Finish, Held, HeldReply, Outcome, Submit, SubmitReply
from weir.bus.protocol import BusTimeout, BusUnavailable
from weir.bus.queue_report import QueueReport
from weir.core.clock import ManualClock
from weir.core.errors import Unavailable
from weir_scheduler.leadership import STUCK_AFTER_S, Leadership


class Disk:
    """Of the server: while it is full the leader key can be read and not written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        update = InMemoryBucket.update

        async def update_if_there_is_room(bucket: InMemoryBucket, key: str, value: bytes, *, revision: int) -> int:
            if self.is_full and key == LEADER_KEY:
                raise BusTimeout("no answer")
            return await update(bucket, key, value, revision=revision)

        monkeypatch.setattr(InMemoryBucket, "update", update_if_there_is_room)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    whole = Stack()
    yield whole
    await whole.close()


async def renew_for(leader: Leadership, clock: ManualClock, seconds: float) -> None:
    for _ in range(round(seconds / 0.5)):
        clock.advance(0.5)
        assert await leader.keep()


async def test_a_leader_is_stuck_when_its_key_cannot_be_written_for_a_while_and_says_what_to_do_once(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    clock, bus = ManualClock(), InMemoryHub().connect()
    leader = Leadership(await bus.bucket("leader"), "a", clock, is_connected=lambda: bus.is_connected)
    await leader.try_take()
    disk.is_full = True
    await renew_for(leader, clock, STUCK_AFTER_S)
    assert (leader.is_certain, leader.stuck_reason) == (False, "")
    await renew_for(leader, clock, 5.0)
    assert "the leader key cannot be written: NATS refuses or does not answer (no answer)" in leader.stuck_reason
    [warning] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "disk of NATS" in warning.getMessage()
    assert "weir restart --rolling nats" in warning.getMessage()
    disk.is_full = False
    await renew_for(leader, clock, 0.5)
    assert (leader.is_certain, leader.stuck_reason) == (True, "")
    disk.is_full = True
    await renew_for(leader, clock, STUCK_AFTER_S)
    assert leader.stuck_reason == "", "it counts from the first failure anew"
    await bus.close()


async def test_a_leader_is_not_stuck_while_the_server_is_away(disk: Disk) -> None:
    clock, hub = ManualClock(), InMemoryHub()
    bus = hub.connect()
    leader = Leadership(await bus.bucket("leader", durable=True), "a", clock, is_connected=lambda: bus.is_connected)
    await leader.try_take()
    hub.stop()
    await renew_for(leader, clock, 30.0)
    hub.start()
    disk.is_full = True
    await renew_for(leader, clock, STUCK_AFTER_S)
    assert leader.stuck_reason == ""
    await bus.close()


async def test_a_stuck_leader_answers_nobody_says_that_it_does_not_lead_and_goes_on_by_itself(
    stack: Stack, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weir_scheduler.leadership.STUCK_AFTER_S", 0.3)
    scheduler, gateway = await stack.add_scheduler(), await stack.add_gateway()
    await gateway.submit("before")
    await eventually(lambda: gateway.grants != [])
    listening, reports = BusEndpoint(stack.hub.connect(), stack.tracer), list[QueueReport]()

    async def on_report(report: QueueReport) -> None:
        reports.append(report)

    await listening.serve(SUBJECTS.queues, QueueReport, on_report)
    disk.is_full = True
    await eventually(lambda: scheduler.describe().metrics["is_leader"] == 0)
    assert scheduler.describe().metrics["leader_key_is_stuck"] == 1
    reports.clear()
    for subject, message, reply_type in (
        (SUBJECTS.submit, Submit("new", "g9", "m", "", "t", 16, 16, 0), SubmitReply),
        (SUBJECTS.reconcile, Held("g9", 1, ()), HeldReply),
        (SUBJECTS.cancel, Cancel("new", "g9"), HeldReply),
        (SUBJECTS.finish, Finish("new", "g9", 1, Outcome.FINISHED, 1), HeldReply),
    ):
        with pytest.raises(BusTimeout):
            await listening.ask(subject, message, reply_type, timeout_s=0.3)
    assert len(reports) <= 1, "none but one that was under way"
    async with Served(scheduler) as served:
        with pytest.raises(Unavailable, match="the leader key cannot be written"):
            await served.describe()

    submitting = asyncio.create_task(gateway.submit("during"))
    await asyncio.sleep(0.5)
    assert not submitting.done()
    disk.is_full = False
    assert (await asyncio.wait_for(submitting, 10)).queued
    await eventually(lambda: gateway.granted_ids == ["before", "during"])
    metrics = scheduler.describe().metrics
    assert (metrics["is_leader"], metrics["leader_key_is_stuck"], metrics["depositions_total"]) == (1, 0, 0)
    assert (gateway.ends, stack.shutdowns) == ({}, [])
    await listening.close()


async def test_a_bus_that_fails_as_a_scheduler_takes_over_is_tried_again(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    subscribe, num_left = InMemoryBus.subscribe, [2]

    async def fail_at_first(bus: InMemoryBus, subject: str, *arguments: object, **options: object) -> object:
        if subject == SUBJECTS.finish and num_left[0]:
            num_left[0] -= 1
            raise BusUnavailable("not now")
        return await subscribe(bus, subject, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(InMemoryBus, "subscribe", fail_at_first)
    bus = stack.hub.connect()
    scheduler, gateway = await stack.add_scheduler("s0", bus), await stack.add_gateway()
    assert stack.shutdowns == []
    assert scheduler.describe().metrics["is_leader"] == 1
    assert len(bus.listeners(SUBJECTS.submit)) == 1, "what the failed tries had opened is closed"
    await gateway.submit("a")
    await eventually(lambda: gateway.grants != [])


async def test_a_scheduler_that_cannot_begin_to_lead_still_ends_in_order(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    subscribe = InMemoryBus.subscribe
    num_tries = 0

    async def fail(bus: InMemoryBus, subject: str, *arguments: object, **options: object) -> object:
        nonlocal num_tries
        if subject == SUBJECTS.finish:
            num_tries += 1
            raise BusUnavailable("not now")
        return await subscribe(bus, subject, *arguments, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(InMemoryBus, "subscribe", fail)
        component = stack.make_scheduler("s0")
        starting = asyncio.create_task(component.start())
        await eventually(lambda: num_tries > 1)
        starting.cancel()
        await asyncio.wait([starting])
        async with asyncio.timeout(10):
            await component.stop()
        assert stack.shutdowns == []

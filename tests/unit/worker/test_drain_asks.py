"""When a worker that drains asks its engine what can be handed over: after something has changed, and else seldom."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest
from tests.unit.worker.rig import (
    GATEWAY,
    Rig,
    Stream,
    begin,
    connected,
    eventually,
    resume_command,
    running_rig,
    start_command,
)

from weir.engine.batching.running import RunningBatcher
from weir.wire.v1 import types_pb2, worker_pb2
from weir.worker.requests.drain import Duty, Untaken, WorkerDrain

SELDOM_S = 0.5
OFTEN_S = 0.05


class Manager:
    """What a drain needs of the request manager."""

    def __init__(self) -> None:
        self.num_live = 1
        self.num_expected = 0

    def begin_drain(self) -> None: ...

    def end_drain(self) -> None: ...

    def refuse_hand_offs(self) -> None: ...


class Draining:
    """A drain with one sequence, begun when made. `try_take` says whether somebody takes that over when asked."""

    def __init__(self, try_take: Callable[[], bool], grace_s: float = 60.0) -> None:
        self.manager = Manager()
        self.asked_at_s: list[float] = []
        self.num_interrupts = 0
        self.shutdowns: list[str] = []
        self._try_take = try_take
        self.drain = WorkerDrain(
            self.manager,  # type: ignore[arg-type]
            self._hand_over,
            self._interrupt,
            lambda: None,
            self.shutdowns.append,
        )
        self.begun_at_s = time.monotonic()
        self.drain.begin(grace_s)

    def _hand_over(self, untaken: Untaken) -> None:
        self.asked_at_s.append(time.monotonic())
        if self._try_take():
            self.manager.num_live = 0

    def _interrupt(self) -> None:
        self.num_interrupts += 1
        self.manager.num_live = 0

    async def asked(self, number: int) -> float:
        """Until it was asked so often; how long that took."""
        await eventually(lambda: len(self.asked_at_s) >= number)
        return self.asked_at_s[number - 1] - self.begun_at_s

    async def stop(self) -> None:
        await self.drain.stop()
        assert self.shutdowns == []


async def test_where_nothing_changes_the_engine_is_asked_at_once_and_then_seldom() -> None:
    draining = Draining(lambda: False)
    assert await draining.asked(1) < SELDOM_S
    assert await draining.asked(4) >= 2.8 * SELDOM_S
    await draining.stop()


async def test_what_changes_is_asked_for_at_once_but_not_at_every_step() -> None:
    draining = Draining(lambda: False)
    await draining.asked(1)
    draining.drain.look_again()
    await draining.asked(2)
    assert draining.asked_at_s[1] - draining.asked_at_s[0] < SELDOM_S
    until_s = time.monotonic() + 6 * OFTEN_S
    while time.monotonic() < until_s:
        draining.drain.look_again()
        await asyncio.sleep(0.001)
    intervals = [later - earlier for earlier, later in zip(draining.asked_at_s, draining.asked_at_s[1:], strict=False)]
    assert min(intervals) >= 0.9 * OFTEN_S
    await draining.stop()


async def test_another_worker_that_can_take_over_only_later_is_found_although_nothing_changes_here() -> None:
    free_at_s = time.monotonic() + 1.5 * SELDOM_S
    draining = Draining(lambda: time.monotonic() >= free_at_s)
    await eventually(lambda: draining.drain.duty is Duty.DRAINED)
    assert draining.num_interrupts == 0
    await draining.stop()


async def test_an_end_that_no_report_brings_is_seen() -> None:
    draining = Draining(lambda: False)
    await draining.asked(1)
    draining.manager.num_live = 0
    await eventually(lambda: draining.drain.duty is Duty.DRAINED)
    assert (len(draining.asked_at_s), draining.num_interrupts) == (1, 0)
    await draining.stop()


async def test_what_nobody_takes_is_interrupted_in_time_although_nothing_changes() -> None:
    draining = Draining(lambda: False, grace_s=0.2)
    await eventually(lambda: draining.drain.duty is Duty.DRAINED)
    assert draining.num_interrupts == 1
    await draining.stop()


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running_rig(num_decode=2) as made:
        yield made


async def begin_one(rig: Rig, streams: tuple[Stream, Stream]) -> worker_pb2.Start:
    """It decodes slowly, and has begun to."""
    rig.on_run["decode"] = lambda plan: time.sleep(0.02)
    start = start_command(rig.decode.worker_id, max_tokens=300)
    await begin(streams, start)
    await streams[1].next_update(start.request_id)
    return start


async def go_on_at(stream: Stream, start: worker_pb2.Start) -> None:
    resume = resume_command(start, 200)
    resume.is_search = True
    await stream.send(resume=resume)
    received = await stream.receive_all(start.request_id)
    assert (received.last.finish_reason, max(received.tokens)) == (types_pb2.FINISH_REASON_LENGTH, 299)


async def test_what_the_engine_answers_is_no_reason_to_ask_it_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    handing_over, go_on = asyncio.Event(), asyncio.Event()
    num_asked = 0
    hand_over = RunningBatcher.hand_over

    def count(batcher: RunningBatcher, *, with_preempted: bool) -> None:
        nonlocal num_asked
        num_asked += 1
        hand_over(batcher, with_preempted=with_preempted)

    async def wait(request_id: str) -> None:
        handing_over.set()
        await go_on.wait()

    giver, other = rig.workers[1:]
    async with (
        connected(rig.prefill, GATEWAY) as prefill,
        connected(other, GATEWAY) as other_stream,
        connected(giver, GATEWAY) as stream,
    ):
        start = await begin_one(rig, (prefill, stream))
        monkeypatch.setattr(RunningBatcher, "hand_over", count)
        rig.arena.before_hand_off = wait
        begun_at_s = time.monotonic()
        giver.shell.begin_drain(20.0)
        await handing_over.wait()
        await asyncio.sleep(1.5)
        assert num_asked <= 3 + (time.monotonic() - begun_at_s) / SELDOM_S
        go_on.set()
        await eventually(lambda: giver.shell.duty is Duty.DRAINED)
        await go_on_at(other_stream, start)
        await rig.wait_idle()
    assert giver.metrics()["handed_over_total"] == 1


async def test_a_worker_that_takes_work_again_takes_over_what_another_one_still_holds(rig: Rig) -> None:
    giver, other = rig.workers[1:]
    other.shell.begin_drain(0.0)
    async with (
        connected(rig.prefill, GATEWAY) as prefill,
        connected(other, GATEWAY) as other_stream,
        connected(giver, GATEWAY) as stream,
    ):
        start = await begin_one(rig, (prefill, stream))
        giver.shell.begin_drain(60.0)
        await eventually(lambda: giver.metrics()["hand_overs_untaken_total"] >= 1)
        assert giver.shell.duty is Duty.DRAINING
        other.shell.end_drain()
        assert (await stream.receive_all(start.request_id)).last.handed_off
        await eventually(lambda: giver.shell.duty is Duty.DRAINED)
        await go_on_at(other_stream, start)
        await rig.wait_idle()

"""A decode worker is emptied amid its sequences: another one goes on at the next token and computes none again."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator

import pytest
from tests.unit.worker.rig import (
    GATEWAY,
    TIMEOUT_S,
    VOCAB_SIZE,
    Received,
    Rig,
    RunningWorker,
    Stream,
    begin_together,
    cancel_command,
    connected,
    eventually,
    hold,
    resume_command,
    running_rig,
    start_command,
)
from tests.unit.worker.test_adoption import KINDS, MAX_TOKENS, read_all, read_some, start_of

from weir.core.errors import DeadlineExceeded
from weir.core.life import Attempt
from weir.engine.messages import SequenceKey
from weir.engine.plan import StepPlan
from weir.testing.runner import reference_tokens
from weir.wire.v1 import types_pb2, worker_pb2
from weir.worker.requests.drain import Duty

DRAINING = worker_pb2.WORKER_ERROR_REASON_DRAINING


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running_rig(gateway_gone_s=5.0, num_decode=2) as made:
        yield made


async def read_to_the_end(stream: Stream, received: dict[str, Received]) -> None:
    """Up to the last update of each at this worker."""
    while not all(one.last.HasField("error") for one in received.values()):
        for update in (await stream.next_frame()).updates:
            received[update.request_id].add(update)


def check_whole(starts: list[worker_pb2.Start], *parts: dict[str, Received]) -> None:
    for start, sampling in zip(starts, KINDS.values(), strict=False):
        tokens = {index: token for part in parts for index, token in part[start.request_id].tokens.items()}
        expected = reference_tokens(tuple(start.prompt_token_ids), sampling, MAX_TOKENS, VOCAB_SIZE)
        assert [tokens[index] for index in range(MAX_TOKENS)] == expected


async def go_on_at(stream: Stream, starts: list[worker_pb2.Start], so_far: dict[str, Received]) -> dict[str, Received]:
    for start in starts:
        resume = resume_command(start, len(so_far[start.request_id].tokens))
        resume.awaits_hand_off = resume.is_search = True
        await stream.send(resume=resume)
    return await read_all(stream, starts)


def num_computed(worker: RunningWorker) -> float:
    metrics = worker.metrics()
    return metrics["prompt_tokens_computed_total"] + metrics["tokens_recomputed_total"]


async def test_every_kind_of_sequence_goes_on_at_another_worker_at_once_whatever_the_grace_period(rig: Rig) -> None:
    starts = [start_of(rig, sampling) for sampling in KINDS.values()]
    giver, adopter = rig.workers[1:]
    async with (
        connected(rig.prefill, GATEWAY) as prefill,
        connected(adopter, GATEWAY) as other,
        connected(giver, GATEWAY) as stream,
    ):
        await begin_together(rig, (prefill, stream), starts)
        received = await read_some(stream, starts, num_tokens=5)
        giver.shell.begin_drain(3600.0)
        await read_to_the_end(stream, received)
        for one in received.values():
            assert (one.last.handed_off, one.last.error.reason, one.last.attempt.adoption) == (True, DRAINING, 0)
            assert list(one.tokens) == list(range(len(one.tokens))), "all that it has sampled came first"
        await eventually(lambda: giver.shell.duty is Duty.DRAINED)
        rest = await go_on_at(other, starts, received)
        assert {one.last.attempt.adoption for one in rest.values()} == {1}
        check_whole(starts, received, rest)
        await rig.wait_idle()
    assert giver.metrics()["handed_over_total"] == adopter.metrics()["adopted_total"] == len(KINDS)
    assert num_computed(adopter) == 0
    assert giver.metrics()["cancelled_total"] == giver.metrics()["failed_total"] == 0


async def test_what_comes_while_it_drains_is_handed_over_too(rig: Rig) -> None:
    start = start_of(rig, KINDS["greedy"])
    giver, adopter = rig.workers[1:]
    handing_off, go_on = asyncio.Event(), asyncio.Event()

    async def wait(request_id: str) -> None:
        handing_off.set()
        await go_on.wait()

    async with (
        connected(rig.prefill, GATEWAY) as prefill,
        connected(adopter, GATEWAY) as other,
        connected(giver, GATEWAY) as stream,
    ):
        rig.arena.before_hand_off = wait
        rig.on_run["decode"] = lambda plan: time.sleep(0.02)
        await stream.send(resume=resume_command(start))
        await prefill.send(start=start)
        await handing_off.wait()
        await eventually(lambda: giver.shell._manager.num_expected == 1)
        giver.shell.begin_drain(20.0)
        go_on.set()
        received = {start.request_id: Received()}
        await read_to_the_end(stream, received)
        check_whole([start], received, await go_on_at(other, [start], received))
        await eventually(lambda: giver.shell.duty is Duty.DRAINED)
        await rig.wait_idle()


async def test_with_the_others_draining_too_it_goes_on_and_is_interrupted_after_the_grace_period(rig: Rig) -> None:
    start = start_of(rig, KINDS["greedy"])
    giver, other = rig.workers[1:]
    other.shell.begin_drain(0.0)
    async with connected(rig.prefill, GATEWAY) as prefill, connected(giver, GATEWAY) as stream:
        await begin_together(rig, (prefill, stream), [start])
        received = await read_some(stream, [start], num_tokens=2)
        giver.shell.begin_drain(3600.0)
        await eventually(lambda: giver.metrics()["hand_overs_untaken_total"] >= 1)
        num_steps = giver.metrics()["decode_steps_total"]
        await eventually(lambda: giver.metrics()["decode_steps_total"] > num_steps + 5)
        giver.shell.begin_drain(0.0)
        await read_to_the_end(stream, received)
        last = received[start.request_id].last
        assert (last.handed_off, last.error.reason) == (False, DRAINING)
        await rig.wait_idle()
    assert giver.metrics()["hand_overs_untaken_total"] >= 2
    assert other.metrics()["adopted_total"] == 0


async def test_one_that_ends_leaves_what_nobody_takes_to_its_successor(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weir.worker.requests.drain._INTERRUPTING_S", 30.0)  # leaving all of them may take a while
    starts = [start_of(rig, sampling) for sampling in KINDS.values()]
    ending, successor = rig.workers[1:]
    successor.shell.begin_drain(0.0)  # not there yet
    async with connected(rig.prefill, GATEWAY) as prefill, connected(successor, GATEWAY) as other:
        async with connected(ending, GATEWAY) as stream:
            await begin_together(rig, (prefill, stream), starts)
            received = await read_some(stream, starts, num_tokens=2)
            stopping = asyncio.create_task(ending.shell.drain(1.2))
            await read_to_the_end(stream, received)
            await stopping
        assert {one.last.handed_off for one in received.values()} == {True}
        successor.shell.end_drain()
        rig.workers.remove(ending)
        await ending.shell.stop()
        await ending.server.stop(None)
        rest = await go_on_at(other, starts, received)
        check_whole(starts, received, rest)
        await rig.wait_idle()
    assert successor.metrics()["adopted_total"] == len(starts)
    assert num_computed(successor) == 0


async def test_one_whose_hand_over_is_not_answered_is_looked_for_and_not_kept(rig: Rig) -> None:
    start = start_of(rig, KINDS["greedy"])
    giver = rig.workers[1]
    async with connected(rig.prefill, GATEWAY) as prefill, connected(giver, GATEWAY) as stream:
        await begin_together(rig, (prefill, stream), [start])
        received = await read_some(stream, [start], num_tokens=2)

        async def unanswered(request_id: str) -> None:
            raise DeadlineExceeded("no answer")

        rig.arena.before_hand_off = unanswered
        giver.shell.begin_drain(20.0)
        await read_to_the_end(stream, received)
        assert received[start.request_id].last.handed_off
        await eventually(lambda: giver.shell.duty is Duty.DRAINED)
        await rig.wait_idle()
    assert giver.metrics()["hand_overs_in_doubt_total"] == 1


async def test_one_that_is_cancelled_while_it_is_handed_over_ends_as_cancelled(rig: Rig) -> None:
    start = start_of(rig, KINDS["greedy"])
    giver, adopter = rig.workers[1:]
    async with connected(rig.prefill, GATEWAY) as prefill, connected(giver, GATEWAY) as stream:
        await begin_together(rig, (prefill, stream), [start])
        await read_some(stream, [start], num_tokens=2)
        in_step, release = threading.Event(), threading.Event()

        def wait(plan: StepPlan) -> None:
            in_step.set()
            hold(release)

        rig.on_run["decode"] = wait
        await asyncio.to_thread(in_step.wait, TIMEOUT_S)
        giver.shell.begin_drain(20.0)
        await stream.send(cancel=cancel_command(start))
        key = SequenceKey(start.request_id, Attempt(start.attempt.dispatch))
        await eventually(lambda: not giver.shell._manager.is_wanted(key))
        release.set()
        assert (await stream.receive_all(start.request_id)).last.finish_reason == types_pb2.FINISH_REASON_CANCELLED
        await eventually(lambda: giver.shell.duty is Duty.DRAINED)
    assert giver.metrics()["cancelled_total"] == 1
    assert adopter.metrics()["adopted_total"] == 0


async def test_gateways_that_search_are_not_waited_for(rig: Rig) -> None:
    giver = rig.workers[1]
    start = start_command(giver.worker_id)
    async with connected(giver, GATEWAY) as stream:
        resume = resume_command(start, 4)
        resume.awaits_hand_off = resume.is_search = True
        await stream.send(resume=resume)
        await eventually(lambda: len(giver.shell._manager._pending_resumes) == 1)
        giver.shell.begin_drain(20.0)
        await eventually(lambda: giver.shell.duty is Duty.DRAINED)

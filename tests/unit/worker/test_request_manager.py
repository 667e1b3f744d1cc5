"""The request manager and the streams, without gRPC and with a clock that is turned by hand."""

import asyncio
from dataclasses import replace

import pytest
from tests.unit.engine.world import params

from weir.core.clock import ManualClock
from weir.core.errors import WeirError
from weir.core.life import Attempt, FinishReason
from weir.engine.loop import InboxFull
from weir.engine.messages import (
    AddSequence,
    Arrival,
    CancelSequence,
    Command,
    SequenceEnded,
    SequenceForgotten,
    SequenceKey,
    TokenSampled,
)
from weir.wire.v1 import types_pb2, worker_pb2
from weir.worker.requests.request_manager import RequestLimits, RequestManager
from weir.worker.requests.request_tables import OutputCollector, Resume, ending_to_pb
from weir.worker.requests.streams import MAX_ANSWERS, MAX_FRAME_TOKENS, GatewayStream, StreamHub

GATEWAY = "gateway-0-00000000"
KEY = SequenceKey(f"{0:032x}", Attempt())
CANCELLED = SequenceEnded(KEY, FinishReason.CANCELLED)


class Bench:
    """A request manager with a gateway's stream, and what it posted to the engine."""

    def __init__(self, *, takes_hand_offs: bool) -> None:
        self.clock = ManualClock()
        self.hub = StreamHub(self.clock)
        self.posted: list[Command] = []
        self.is_inbox_full = False
        self.has_one_place_left = False
        limits = RequestLimits(
            max_live=4, takes_hand_offs=takes_hand_offs, max_retained=2, max_cancelled=3, max_pending_resumes=2
        )
        self.manager = RequestManager(limits, self._post, self.hub, self.clock)
        self.stream = self.hub.attach(GATEWAY)

    def _post(self, command: Command) -> None:
        if self.is_inbox_full:
            raise InboxFull("0 commands wait for the engine")
        self.posted.append(command)
        self.is_inbox_full = self.has_one_place_left


async def frame_of(stream: GatewayStream) -> worker_pb2.StepFrame:
    async with asyncio.timeout(10):
        frame = await stream.next_frame()
    assert frame is not None
    return frame


async def has_ended(stream: GatewayStream) -> bool:
    async with asyncio.timeout(10):
        return await stream.next_frame() is None


async def sends_nothing(stream: GatewayStream) -> bool:
    try:
        async with asyncio.timeout(0.02):
            await stream.next_frame()
    except TimeoutError:
        return True
    return False


def error_of(update: worker_pb2.SequenceUpdate) -> "worker_pb2.WorkerErrorReason.ValueType":
    assert update.HasField("error")
    return update.error.reason


def arrival(index: int = 0) -> Arrival:
    return Arrival(params((1, 2, 3), index), slot=index, output_token_ids=(9,), num_computed_tokens=3)


async def test_tokens_of_several_steps_wait_in_one_frame_while_none_is_taken() -> None:
    bench = Bench(takes_hand_offs=False)
    assert bench.manager.try_start(bench.stream, Arrival(params((1, 2))))
    for index in range(3):
        bench.manager.on_event(TokenSampled(KEY, index, 100 + index), step=index + 1)
    bench.manager.on_event(SequenceEnded(KEY, FinishReason.LENGTH), step=3)
    frame = await frame_of(bench.stream)
    assert frame.step == 3
    (update,) = frame.updates
    assert (update.first_index, list(update.token_ids)) == (0, [100, 101, 102])
    assert update.finish_reason == types_pb2.FINISH_REASON_LENGTH
    assert await sends_nothing(bench.stream)


async def test_a_frame_is_bounded_and_the_rest_follows() -> None:
    stream = GatewayStream(GATEWAY)
    collector = OutputCollector(KEY, GATEWAY, list(range(MAX_FRAME_TOKENS + 5)), next_index=0)
    stream.mark(collector, step=1)
    first, second = await frame_of(stream), await frame_of(stream)
    assert len(first.updates[0].token_ids) == MAX_FRAME_TOKENS
    assert second.updates[0].first_index == MAX_FRAME_TOKENS
    assert len(second.updates[0].token_ids) == 5


async def test_while_a_gateway_takes_no_answers_no_commands_are_taken_from_it() -> None:
    stream = GatewayStream(GATEWAY)
    for _ in range(MAX_ANSWERS):
        stream.answer(CANCELLED)
    waiting = asyncio.create_task(stream.wait_for_room())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await frame_of(stream)
    await asyncio.wait_for(waiting, 10)


async def test_a_finished_stream_sends_all_it_has_first() -> None:
    stream = GatewayStream(GATEWAY)
    stream.answer(CANCELLED)
    stream.finish()
    assert list((await frame_of(stream)).updates) == [ending_to_pb(CANCELLED)]
    assert await has_ended(stream)


async def test_the_first_error_of_a_stream_counts() -> None:
    stream = GatewayStream(GATEWAY)
    error = WeirError("first")
    stream.close(error)
    stream.close(WeirError("second"))
    assert stream.error is error
    assert await has_ended(stream)


async def test_a_new_stream_of_a_gateway_ends_the_old_one_and_waits_for_resumes() -> None:
    bench = Bench(takes_hand_offs=False)
    bench.manager.try_start(bench.stream, Arrival(params((1, 2))))
    bench.manager.pause(GATEWAY)
    newer = bench.hub.attach(GATEWAY)
    assert await has_ended(bench.stream)
    bench.manager.on_stream_end(bench.stream)
    assert bench.hub.get(GATEWAY) is newer
    bench.manager.on_event(TokenSampled(KEY, 0, 7), step=1)
    assert await sends_nothing(newer)
    bench.manager.resume(newer, Resume(KEY, 0))
    assert (await frame_of(newer)).updates[0].token_ids == [7]


async def test_a_resume_before_the_hand_off_waits_and_is_honoured() -> None:
    bench = Bench(takes_hand_offs=True)
    bench.manager.resume(bench.stream, Resume(KEY, 1, awaits_hand_off=True))
    assert bench.manager.num_expected == 1
    assert await sends_nothing(bench.stream)
    assert bench.manager.try_take_over(arrival())
    assert bench.manager.num_expected == 0
    bench.manager.on_event(TokenSampled(KEY, 1, 8), step=1)
    assert (await frame_of(bench.stream)).updates[0].first_index == 1


async def test_a_hand_off_that_the_engine_has_no_room_for_ends_with_an_error_whenever_its_gateway_asks() -> None:
    bench = Bench(takes_hand_offs=True)
    assert bench.manager.try_take_over(arrival())
    assert list((await frame_of(bench.stream)).updates[0].token_ids) == [9]
    newer = replace(arrival(), params=replace(arrival().params, attempt=Attempt(2)))
    bench.is_inbox_full = True
    assert not bench.manager.try_take_over(newer)
    assert bench.manager.num_live == 0
    (update,) = (await frame_of(bench.stream)).updates
    assert (update.attempt.dispatch, list(update.token_ids)) == (2, [9])
    assert error_of(update) == worker_pb2.WORKER_ERROR_REASON_NO_CAPACITY
    bench.manager.resume(bench.stream, Resume(SequenceKey(KEY.request_id, Attempt(2)), 1))
    assert error_of((await frame_of(bench.stream)).updates[0]) == worker_pb2.WORKER_ERROR_REASON_NO_CAPACITY
    bench.is_inbox_full = False
    bench.manager.sweep()
    assert bench.posted[1:] == [CancelSequence(KEY)], "the older attempt does not run on unseen"


async def test_without_a_resume_a_connected_gateway_is_sent_everything() -> None:
    bench = Bench(takes_hand_offs=True)
    bench.manager.try_take_over(arrival())
    (update,) = (await frame_of(bench.stream)).updates
    assert (update.request_id, update.first_index, list(update.token_ids)) == (KEY.request_id, 0, [9])


@pytest.mark.parametrize(("awaits_hand_off", "after_s"), [(False, 0.0), (True, 30.0)])
async def test_a_resume_of_what_is_not_here_is_answered(awaits_hand_off: bool, after_s: float) -> None:
    """At once where the worker had it, as the gateway knows; else it may still be on its way, for a while."""
    bench = Bench(takes_hand_offs=True)
    bench.manager.resume(bench.stream, Resume(KEY, 1, awaits_hand_off=awaits_hand_off))
    bench.clock.advance(after_s)
    bench.manager.sweep()
    assert error_of((await frame_of(bench.stream)).updates[0]) == worker_pb2.WORKER_ERROR_REASON_UNKNOWN_REQUEST


async def test_pending_resumes_are_bounded() -> None:
    bench = Bench(takes_hand_offs=True)
    for index in range(5):
        bench.manager.resume(bench.stream, Resume(SequenceKey(f"{index:032x}", Attempt()), 0, awaits_hand_off=True))
    assert bench.manager.num_expected == 2


async def test_a_cancelled_request_is_not_taken_over_until_it_is_forgotten() -> None:
    bench = Bench(takes_hand_offs=True)
    bench.manager.cancel(bench.stream, KEY)
    assert not bench.manager.try_take_over(arrival())
    bench.clock.advance(60)
    bench.manager.sweep()
    assert bench.manager.try_take_over(arrival())


async def test_a_sequence_is_cancelled_in_the_engine_once() -> None:
    bench = Bench(takes_hand_offs=False)
    bench.manager.try_start(bench.stream, Arrival(params((1, 2))))
    for _ in range(5):
        bench.manager.cancel(bench.stream, KEY)
    assert bench.posted[1:] == [CancelSequence(KEY)]


async def test_a_cancel_that_finds_the_inbox_full_is_posted_later_and_once() -> None:
    bench = Bench(takes_hand_offs=False)
    bench.manager.try_start(bench.stream, Arrival(params((1, 2))))
    bench.is_inbox_full = True
    bench.manager.cancel(bench.stream, KEY)
    bench.manager.sweep()
    assert bench.posted[1:] == []
    bench.is_inbox_full = False
    bench.manager.sweep()
    bench.manager.sweep()
    bench.manager.cancel(bench.stream, KEY)
    assert bench.posted[1:] == [CancelSequence(KEY)]


async def test_a_vanished_gateway_loses_its_sequences_though_the_inbox_was_full_when_it_went() -> None:
    bench = Bench(takes_hand_offs=False)
    bench.manager.try_start(bench.stream, Arrival(params((1, 2))))
    bench.manager.on_stream_end(bench.stream)
    bench.clock.advance(5.0)
    bench.is_inbox_full = True
    bench.manager.sweep()
    bench.is_inbox_full = False
    bench.manager.sweep()
    assert bench.posted[1:] == [CancelSequence(KEY)]


async def test_a_sequence_that_a_newer_attempt_replaced_is_cancelled_though_the_inbox_was_full() -> None:
    bench = Bench(takes_hand_offs=False)
    bench.manager.try_start(bench.stream, Arrival(params((1, 2))))
    newer = replace(params((1, 2)), attempt=Attempt(2))
    bench.has_one_place_left = True
    assert bench.manager.try_start(bench.stream, Arrival(newer))
    assert bench.is_inbox_full
    bench.is_inbox_full = bench.has_one_place_left = False
    bench.manager.sweep()
    assert bench.posted[1:] == [AddSequence(Arrival(newer)), CancelSequence(KEY)]


async def test_what_ended_before_its_cancel_could_be_posted_is_not_cancelled() -> None:
    bench = Bench(takes_hand_offs=False)
    bench.manager.try_start(bench.stream, Arrival(params((1, 2))))
    bench.is_inbox_full = True
    bench.manager.cancel(bench.stream, KEY)
    bench.manager.on_event(SequenceEnded(KEY, FinishReason.LENGTH), step=1)
    bench.is_inbox_full = False
    bench.manager.sweep()
    assert bench.posted[1:] == []


async def test_a_cancel_of_what_is_not_here_is_answered_at_once() -> None:
    bench = Bench(takes_hand_offs=True)
    bench.manager.cancel(bench.stream, KEY)
    assert (await frame_of(bench.stream)).updates[0].finish_reason == types_pb2.FINISH_REASON_CANCELLED


async def test_a_cancel_of_what_runs_is_answered_by_its_end_alone() -> None:
    bench = Bench(takes_hand_offs=False)
    bench.manager.try_start(bench.stream, Arrival(params((1, 2))))
    bench.manager.cancel(bench.stream, KEY)
    assert await sends_nothing(bench.stream)
    bench.manager.on_event(SequenceEnded(KEY, FinishReason.CANCELLED), step=1)
    (update,) = (await frame_of(bench.stream)).updates
    assert update.finish_reason == types_pb2.FINISH_REASON_CANCELLED
    assert await sends_nothing(bench.stream)


async def test_a_cancel_of_what_has_ended_and_whose_end_was_sent_is_answered() -> None:
    bench = Bench(takes_hand_offs=False)
    bench.manager.try_start(bench.stream, Arrival(params((1, 2))))
    bench.manager.on_event(SequenceEnded(KEY, FinishReason.LENGTH), step=1)
    assert (await frame_of(bench.stream)).updates[0].finish_reason == types_pb2.FINISH_REASON_LENGTH
    bench.manager.cancel(bench.stream, KEY)
    assert (await frame_of(bench.stream)).updates[0].finish_reason == types_pb2.FINISH_REASON_CANCELLED


@pytest.mark.parametrize("is_ended", [False, True], ids=["running", "ended"])
async def test_a_cancel_on_a_new_stream_is_answered_though_the_sequence_was_not_asked_for(is_ended: bool) -> None:
    bench = Bench(takes_hand_offs=False)
    bench.manager.try_start(bench.stream, Arrival(params((1, 2))))
    bench.manager.on_stream_end(bench.stream)
    if is_ended:
        bench.manager.on_event(SequenceEnded(KEY, FinishReason.CANCELLED), step=1)
    stream = bench.hub.attach(GATEWAY)
    bench.manager.cancel(stream, KEY)
    assert (await frame_of(stream)).updates[0].finish_reason == types_pb2.FINISH_REASON_CANCELLED
    assert bench.posted[1:] == ([] if is_ended else [CancelSequence(KEY)])


async def test_a_cancel_of_a_newer_attempt_drops_the_older_one_and_is_answered() -> None:
    bench = Bench(takes_hand_offs=False)
    bench.manager.try_start(bench.stream, Arrival(params((1, 2))))
    newer = SequenceKey(KEY.request_id, Attempt(2))
    bench.manager.cancel(bench.stream, newer)
    (update,) = (await frame_of(bench.stream)).updates
    assert (update.request_id, update.attempt.dispatch) == (newer.request_id, 2)
    assert bench.posted[1:] == [CancelSequence(KEY)]


async def test_ended_sequences_are_kept_for_a_while_and_only_so_many() -> None:
    bench = Bench(takes_hand_offs=False)
    keys = [SequenceKey(f"{index:032x}", Attempt()) for index in range(3)]
    for index, key in enumerate(keys):
        bench.manager.try_start(bench.stream, Arrival(params((1, 2), index)))
        bench.manager.on_event(SequenceForgotten(key), step=1)
    assert bench.manager.num_live == 0
    await frame_of(bench.stream)
    bench.manager.resume(bench.stream, Resume(keys[0], 0))
    assert error_of((await frame_of(bench.stream)).updates[0]) == worker_pb2.WORKER_ERROR_REASON_UNKNOWN_REQUEST
    bench.manager.resume(bench.stream, Resume(keys[2], 0))
    assert (await frame_of(bench.stream)).updates[0].handed_off
    bench.clock.advance(10)
    bench.manager.sweep()
    bench.manager.resume(bench.stream, Resume(keys[2], 0))
    assert error_of((await frame_of(bench.stream)).updates[0]) == worker_pb2.WORKER_ERROR_REASON_UNKNOWN_REQUEST


async def test_a_gateway_that_comes_back_in_time_keeps_its_sequences() -> None:
    bench = Bench(takes_hand_offs=False)
    bench.manager.try_start(bench.stream, Arrival(params((1, 2))))
    bench.manager.on_stream_end(bench.stream)
    bench.clock.advance(4.9)
    bench.manager.sweep()
    bench.hub.attach(GATEWAY)
    bench.clock.advance(60)
    bench.manager.sweep()
    assert bench.posted == [AddSequence(Arrival(params((1, 2))))]


async def test_a_gateway_that_is_gone_loses_its_sequences() -> None:
    bench = Bench(takes_hand_offs=False)
    bench.manager.try_start(bench.stream, Arrival(params((1, 2))))
    bench.manager.on_stream_end(bench.stream)
    bench.clock.advance(5.0)
    bench.manager.sweep()
    assert bench.posted[1:] == [CancelSequence(KEY)]
    assert not bench.manager.is_wanted(KEY)


async def test_a_sequence_of_a_gateway_that_never_connected_is_given_up_too() -> None:
    bench = Bench(takes_hand_offs=True)
    bench.manager.on_stream_end(bench.stream)
    bench.clock.advance(5.0)
    bench.manager.sweep()
    assert bench.manager.try_take_over(arrival())
    bench.clock.advance(5.0)
    bench.manager.sweep()
    assert bench.posted[1:] == [CancelSequence(KEY)]


async def test_an_attempt_that_another_gateway_runs_is_refused() -> None:
    bench = Bench(takes_hand_offs=False)
    bench.manager.try_start(bench.stream, Arrival(params((1, 2))))
    other = bench.hub.attach("gateway-1-00000000")
    assert not bench.manager.try_start(other, Arrival(params((1, 2))))
    assert error_of((await frame_of(other)).updates[0]) == worker_pb2.WORKER_ERROR_REASON_STALE_ATTEMPT


async def test_a_prompt_that_comes_with_output_goes_on_behind_it() -> None:
    bench = Bench(takes_hand_offs=False)
    bench.manager.try_start(bench.stream, Arrival(params((1, 2)), output_token_ids=(7, 8)))
    bench.manager.on_event(TokenSampled(KEY, 2, 9), step=1)
    (update,) = (await frame_of(bench.stream)).updates
    assert (update.first_index, list(update.token_ids)) == (2, [9])

"""The desk and the streams, without gRPC and with a clock that is turned by hand."""

import asyncio
from dataclasses import replace

import pytest
from tests.unit.engine.world import params

from weir.core.attempt import Attempt
from weir.core.clock import ManualClock
from weir.core.errors import WeirError
from weir.core.life import FinishReason
from weir.engine.loop import InboxFull
from weir.engine.messages import (
    AddSequence,
    Arrival,
    CancelSequence,
    Command,
    FailureReason,
    SequenceEnded,
    SequenceForgotten,
    SequenceKey,
    TokenSampled,
)
from weir.worker.requests.output_collector import OutputCollector, Update
from weir.worker.requests.request_manager import RequestLimits, RequestManager
from weir.worker.requests.streams import MAX_ANSWERS, MAX_FRAME_TOKENS, Frame, GatewayStream, StreamHub
from weir.worker.requests.tombstones import CancelledRequests

GATEWAY = "gateway-0-00000000"
KEY = SequenceKey(f"{0:032x}", Attempt())


class Office:
    """A desk with everything around it."""

    def __init__(self, *, takes_hand_offs: bool) -> None:
        self.clock = ManualClock()
        self.hub = StreamHub(self.clock)
        self.posted: list[Command] = []
        self.is_inbox_full = False
        self.is_last_place = False
        limits = RequestLimits(
            max_live=4, takes_hand_offs=takes_hand_offs, max_tails=2, max_tombstones=3, max_early_resumes=2
        )
        self.manager = RequestManager(limits, self._post, self.hub, self.clock)
        self.stream = self.hub.attach(GATEWAY)

    def _post(self, command: Command) -> None:
        if self.is_inbox_full:
            raise InboxFull("0 commands wait for the engine")
        self.posted.append(command)
        self.is_inbox_full = self.is_last_place


async def frame_of(stream: GatewayStream) -> Frame:
    async with asyncio.timeout(1):
        frame = await stream.next_frame()
    assert frame is not None
    return frame


async def has_ended(stream: GatewayStream) -> bool:
    async with asyncio.timeout(1):
        return await stream.next_frame() is None


async def has_nothing_to_say(stream: GatewayStream) -> bool:
    try:
        async with asyncio.timeout(0.02):
            await stream.next_frame()
    except TimeoutError:
        return True
    return False


def reason_of(update: Update) -> FailureReason | FinishReason | None:
    assert update.ending is not None
    return update.ending.reason if update.ending.failure is None else update.ending.failure.reason


def arrival(index: int = 0) -> Arrival:
    return Arrival(params((1, 2, 3), index), slot=index, output_token_ids=(9,), num_computed_tokens=3)


async def test_tokens_of_several_steps_wait_in_one_frame_while_nobody_reads() -> None:
    office = Office(takes_hand_offs=False)
    assert office.manager.try_start(office.stream, params((1, 2)))
    for index in range(3):
        office.manager.on_event(TokenSampled(KEY, index, 100 + index), step=index + 1)
    office.manager.on_event(SequenceEnded(KEY, FinishReason.LENGTH), step=3)
    frame = await frame_of(office.stream)
    assert frame.step == 3
    (update,) = frame.updates
    assert (update.first_index, update.token_ids) == (0, (100, 101, 102))
    assert reason_of(update) is FinishReason.LENGTH
    assert await has_nothing_to_say(office.stream)


async def test_a_frame_is_bounded_and_the_rest_follows() -> None:
    stream = GatewayStream(GATEWAY)
    collector = OutputCollector(KEY, GATEWAY, list(range(MAX_FRAME_TOKENS + 5)), next_index=0)
    stream.mark(collector, step=1)
    first, second = await frame_of(stream), await frame_of(stream)
    assert len(first.updates[0].token_ids) == MAX_FRAME_TOKENS
    assert second.updates[0].first_index == MAX_FRAME_TOKENS
    assert len(second.updates[0].token_ids) == 5


async def test_a_gateway_that_does_not_read_answers_is_not_read_from() -> None:
    stream = GatewayStream(GATEWAY)
    for _ in range(MAX_ANSWERS):
        stream.answer(Update(KEY))
    waiting = asyncio.create_task(stream.wait_for_room())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await frame_of(stream)
    await asyncio.wait_for(waiting, 1)


async def test_a_finished_stream_says_all_it_has_first() -> None:
    stream = GatewayStream(GATEWAY)
    stream.answer(Update(KEY))
    stream.finish()
    assert (await frame_of(stream)).updates == (Update(KEY),)
    assert await has_ended(stream)


async def test_the_first_error_of_a_stream_counts() -> None:
    stream = GatewayStream(GATEWAY)
    error = WeirError("first")
    stream.close(error)
    stream.close(WeirError("second"))
    assert stream.error is error
    assert await has_ended(stream)


async def test_a_new_stream_of_a_gateway_ends_the_old_one_and_waits_to_be_asked() -> None:
    office = Office(takes_hand_offs=False)
    office.manager.try_start(office.stream, params((1, 2)))
    office.manager.pause(GATEWAY)
    newer = office.hub.attach(GATEWAY)
    assert await has_ended(office.stream)
    office.manager.on_stream_end(office.stream)
    assert office.hub.get(GATEWAY) is newer
    office.manager.on_event(TokenSampled(KEY, 0, 7), step=1)
    assert await has_nothing_to_say(newer)
    office.manager.resume(newer, KEY, 0)
    assert (await frame_of(newer)).updates[0].token_ids == (7,)


async def test_a_resume_before_the_hand_off_waits_and_is_honoured() -> None:
    office = Office(takes_hand_offs=True)
    office.manager.resume(office.stream, KEY, 1)
    assert office.manager.num_expected == 1
    assert await has_nothing_to_say(office.stream)
    assert office.manager.try_take_over(arrival())
    assert office.manager.num_expected == 0
    office.manager.on_event(TokenSampled(KEY, 1, 8), step=1)
    assert (await frame_of(office.stream)).updates[0].first_index == 1


async def test_without_a_resume_a_connected_gateway_is_told_everything() -> None:
    office = Office(takes_hand_offs=True)
    office.manager.try_take_over(arrival())
    assert (await frame_of(office.stream)).updates == (Update(KEY, 0, (9,)),)


@pytest.mark.parametrize(("next_index", "after_s"), [(2, 0.0), (1, 30.0)])
async def test_a_resume_of_what_is_not_here_is_answered(next_index: int, after_s: float) -> None:
    """Token 2 can only have come from a decode worker; token 1 may still be on its way, for a while."""
    office = Office(takes_hand_offs=True)
    office.manager.resume(office.stream, KEY, next_index)
    office.clock.advance(after_s)
    office.manager.sweep()
    assert reason_of((await frame_of(office.stream)).updates[0]) is FailureReason.UNKNOWN_REQUEST


async def test_early_resumes_are_bounded() -> None:
    office = Office(takes_hand_offs=True)
    for index in range(5):
        office.manager.resume(office.stream, SequenceKey(f"{index:032x}", Attempt()), 0)
    assert office.manager.num_expected == 2


async def test_a_cancelled_request_is_not_taken_over_until_the_tombstone_is_gone() -> None:
    office = Office(takes_hand_offs=True)
    office.manager.cancel(office.stream, KEY)
    assert not office.manager.try_take_over(arrival())
    office.clock.advance(60)
    office.manager.sweep()
    assert office.manager.try_take_over(arrival())


async def test_a_cancel_counts_for_older_attempts_and_not_for_newer_ones() -> None:
    stones = CancelledRequests(ManualClock(), ttl_s=60, max_entries=10)
    stones.put(SequenceKey("a", Attempt(2)))
    stones.put(SequenceKey("a", Attempt(1)))
    assert stones.covers(SequenceKey("a", Attempt(1)))
    assert stones.covers(SequenceKey("a", Attempt(2)))
    assert not stones.covers(SequenceKey("a", Attempt(2, 1)))


async def test_tombstones_are_bounded() -> None:
    stones = CancelledRequests(ManualClock(), ttl_s=60, max_entries=3)
    for name in "abcd":
        stones.put(SequenceKey(name, Attempt()))
    assert len(stones) == 3
    assert not stones.covers(SequenceKey("a", Attempt()))


async def test_a_sequence_is_cancelled_in_the_engine_once() -> None:
    office = Office(takes_hand_offs=False)
    office.manager.try_start(office.stream, params((1, 2)))
    for _ in range(5):
        office.manager.cancel(office.stream, KEY)
    assert office.posted[1:] == [CancelSequence(KEY)]


async def test_a_cancel_that_finds_the_inbox_full_is_posted_later_and_once() -> None:
    office = Office(takes_hand_offs=False)
    office.manager.try_start(office.stream, params((1, 2)))
    office.is_inbox_full = True
    office.manager.cancel(office.stream, KEY)
    office.manager.sweep()
    assert office.posted[1:] == []
    office.is_inbox_full = False
    office.manager.sweep()
    office.manager.sweep()
    office.manager.cancel(office.stream, KEY)
    assert office.posted[1:] == [CancelSequence(KEY)]


async def test_a_vanished_gateway_loses_its_sequences_though_the_inbox_was_full_when_it_went() -> None:
    office = Office(takes_hand_offs=False)
    office.manager.try_start(office.stream, params((1, 2)))
    office.manager.on_stream_end(office.stream)
    office.clock.advance(5.0)
    office.is_inbox_full = True
    office.manager.sweep()
    office.is_inbox_full = False
    office.manager.sweep()
    assert office.posted[1:] == [CancelSequence(KEY)]


async def test_a_sequence_that_a_newer_attempt_replaced_is_cancelled_though_the_inbox_was_full() -> None:
    office = Office(takes_hand_offs=False)
    office.manager.try_start(office.stream, params((1, 2)))
    newer = replace(params((1, 2)), attempt=Attempt(2))
    office.is_last_place = True
    assert office.manager.try_start(office.stream, newer)
    assert office.is_inbox_full
    office.is_inbox_full = office.is_last_place = False
    office.manager.sweep()
    assert office.posted[1:] == [AddSequence(Arrival(newer)), CancelSequence(KEY)]


async def test_what_ended_before_its_cancel_could_be_posted_is_not_cancelled() -> None:
    office = Office(takes_hand_offs=False)
    office.manager.try_start(office.stream, params((1, 2)))
    office.is_inbox_full = True
    office.manager.cancel(office.stream, KEY)
    office.manager.on_event(SequenceEnded(KEY, FinishReason.LENGTH), step=1)
    office.is_inbox_full = False
    office.manager.sweep()
    assert office.posted[1:] == []


async def test_a_cancel_of_what_is_not_here_is_answered_at_once() -> None:
    office = Office(takes_hand_offs=True)
    office.manager.cancel(office.stream, KEY)
    assert reason_of((await frame_of(office.stream)).updates[0]) is FinishReason.CANCELLED


async def test_a_cancel_of_what_runs_is_answered_by_its_end_alone() -> None:
    office = Office(takes_hand_offs=False)
    office.manager.try_start(office.stream, params((1, 2)))
    office.manager.cancel(office.stream, KEY)
    assert await has_nothing_to_say(office.stream)
    office.manager.on_event(SequenceEnded(KEY, FinishReason.CANCELLED), step=1)
    (update,) = (await frame_of(office.stream)).updates
    assert reason_of(update) is FinishReason.CANCELLED
    assert await has_nothing_to_say(office.stream)


async def test_a_cancel_of_what_has_ended_and_was_told_is_answered() -> None:
    office = Office(takes_hand_offs=False)
    office.manager.try_start(office.stream, params((1, 2)))
    office.manager.on_event(SequenceEnded(KEY, FinishReason.LENGTH), step=1)
    assert reason_of((await frame_of(office.stream)).updates[0]) is FinishReason.LENGTH
    office.manager.cancel(office.stream, KEY)
    assert reason_of((await frame_of(office.stream)).updates[0]) is FinishReason.CANCELLED


@pytest.mark.parametrize("is_ended", [False, True], ids=["running", "ended"])
async def test_a_cancel_on_a_new_stream_is_answered_though_the_sequence_was_not_asked_for(is_ended: bool) -> None:
    office = Office(takes_hand_offs=False)
    office.manager.try_start(office.stream, params((1, 2)))
    office.manager.on_stream_end(office.stream)
    if is_ended:
        office.manager.on_event(SequenceEnded(KEY, FinishReason.CANCELLED), step=1)
    stream = office.hub.attach(GATEWAY)
    office.manager.cancel(stream, KEY)
    assert reason_of((await frame_of(stream)).updates[0]) is FinishReason.CANCELLED
    assert office.posted[1:] == ([] if is_ended else [CancelSequence(KEY)])


async def test_a_cancel_of_a_newer_attempt_drops_the_older_one_and_is_answered() -> None:
    office = Office(takes_hand_offs=False)
    office.manager.try_start(office.stream, params((1, 2)))
    newer = SequenceKey(KEY.request_id, Attempt(2))
    office.manager.cancel(office.stream, newer)
    (update,) = (await frame_of(office.stream)).updates
    assert update.key == newer
    assert office.posted[1:] == [CancelSequence(KEY)]


async def test_ended_sequences_are_kept_for_a_while_and_only_so_many() -> None:
    office = Office(takes_hand_offs=False)
    keys = [SequenceKey(f"{index:032x}", Attempt()) for index in range(3)]
    for index, key in enumerate(keys):
        office.manager.try_start(office.stream, params((1, 2), index))
        office.manager.on_event(SequenceForgotten(key), step=1)
    assert office.manager.num_live == 0
    await frame_of(office.stream)
    office.manager.resume(office.stream, keys[0], 0)
    assert reason_of((await frame_of(office.stream)).updates[0]) is FailureReason.UNKNOWN_REQUEST
    office.manager.resume(office.stream, keys[2], 0)
    ending = (await frame_of(office.stream)).updates[0].ending
    assert ending is not None
    assert ending.is_handed_off
    office.clock.advance(10)
    office.manager.sweep()
    office.manager.resume(office.stream, keys[2], 0)
    assert reason_of((await frame_of(office.stream)).updates[0]) is FailureReason.UNKNOWN_REQUEST


async def test_a_gateway_that_comes_back_in_time_keeps_its_sequences() -> None:
    office = Office(takes_hand_offs=False)
    office.manager.try_start(office.stream, params((1, 2)))
    office.manager.on_stream_end(office.stream)
    office.clock.advance(4.9)
    office.manager.sweep()
    office.hub.attach(GATEWAY)
    office.clock.advance(60)
    office.manager.sweep()
    assert office.posted == [AddSequence(Arrival(params((1, 2))))]


async def test_a_gateway_that_is_gone_loses_its_sequences() -> None:
    office = Office(takes_hand_offs=False)
    office.manager.try_start(office.stream, params((1, 2)))
    office.manager.on_stream_end(office.stream)
    office.clock.advance(5.0)
    office.manager.sweep()
    assert office.posted[1:] == [CancelSequence(KEY)]
    assert not office.manager.is_wanted(KEY)


async def test_a_sequence_of_a_gateway_that_never_connected_is_given_up_too() -> None:
    office = Office(takes_hand_offs=True)
    office.manager.on_stream_end(office.stream)
    office.clock.advance(5.0)
    office.manager.sweep()
    assert office.manager.try_take_over(arrival())
    office.clock.advance(5.0)
    office.manager.sweep()
    assert office.posted[1:] == [CancelSequence(KEY)]


async def test_an_attempt_that_another_gateway_runs_is_refused() -> None:
    office = Office(takes_hand_offs=False)
    office.manager.try_start(office.stream, params((1, 2)))
    other = office.hub.attach("gateway-1-00000000")
    assert not office.manager.try_start(other, params((1, 2)))
    assert reason_of((await frame_of(other)).updates[0]) is FailureReason.STALE_ATTEMPT

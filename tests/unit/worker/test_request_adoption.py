"""The request manager and sequences of workers that have ended: who is sent what, and until when."""

from dataclasses import replace

from tests.unit.worker.test_request_manager import GATEWAY, KEY, Bench, arrival, frame_of, sends_nothing

from weir.core.life import Attempt
from weir.engine.messages import Arrival, CancelSequence, SequenceKey, TokenSampled
from weir.wire.v1 import types_pb2
from weir.worker.requests.request_tables import Resume


def adopted() -> Arrival:
    return replace(arrival(), params=replace(arrival().params, attempt=Attempt(1, 1)))


async def test_what_was_adopted_is_sent_to_its_gateway_from_where_that_wants_to_go_on_once_it_asks() -> None:
    """By the attempt that it knows: it may not have missed the old worker yet when the new one has the sequence."""
    bench = Bench(takes_hand_offs=True)
    assert bench.manager.try_take_over(adopted())
    bench.manager.on_event(TokenSampled(SequenceKey(KEY.request_id, Attempt(1, 1)), 1, 8), step=1)
    assert await sends_nothing(bench.stream)
    bench.manager.resume(bench.stream, Resume(KEY, 1, awaits_hand_off=True))
    (update,) = (await frame_of(bench.stream)).updates
    assert (update.attempt.adoption, update.first_index, list(update.token_ids)) == (1, 1, [8])


async def test_what_was_adopted_and_nobody_asks_for_is_cancelled_in_time() -> None:
    bench = Bench(takes_hand_offs=True)
    assert bench.manager.try_take_over(adopted())
    bench.clock.advance(39)
    bench.manager.sweep()
    assert len(bench.posted) == 1
    bench.clock.advance(1)
    bench.manager.sweep()
    assert bench.posted[1:] == [CancelSequence(SequenceKey(KEY.request_id, Attempt(1, 1)))]


async def test_what_was_adopted_and_asked_for_once_runs_to_its_end_though_the_stream_breaks() -> None:
    bench = Bench(takes_hand_offs=True)
    assert bench.manager.try_take_over(adopted())
    bench.manager.resume(bench.stream, Resume(KEY, 1, awaits_hand_off=True))
    bench.manager.pause(GATEWAY)
    bench.clock.advance(60)
    bench.manager.sweep()
    assert len(bench.posted) == 1


async def test_a_resume_waits_for_whatever_adoption_of_its_dispatch_comes() -> None:
    bench = Bench(takes_hand_offs=True)
    bench.manager.resume(bench.stream, Resume(KEY, 0, awaits_hand_off=True))
    assert bench.manager.try_take_over(adopted())
    (update,) = (await frame_of(bench.stream)).updates
    assert (update.attempt.adoption, list(update.token_ids)) == (1, [9])
    assert bench.manager.num_expected == 0


async def test_a_cancel_covers_every_adoption_of_its_dispatch() -> None:
    bench = Bench(takes_hand_offs=True)
    assert bench.manager.try_take_over(adopted())
    bench.manager.cancel(bench.stream, KEY)
    assert bench.posted[1:] == [CancelSequence(SequenceKey(KEY.request_id, Attempt(1, 1)))]
    assert (await frame_of(bench.stream)).updates[0].finish_reason == types_pb2.FINISH_REASON_CANCELLED
    later = replace(adopted(), params=replace(adopted().params, attempt=Attempt(1, 2)))
    assert not bench.manager.try_take_over(later)

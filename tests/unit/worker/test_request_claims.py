"""The request manager and sequences whose gateway has gone: how long they are kept, and who goes on with them."""

from dataclasses import replace

import pytest
from tests.unit.engine.world import params
from tests.unit.worker.test_request_manager import GATEWAY, KEY, Bench, arrival, error_of, frame_of, sends_nothing

from weir.core.life import Attempt, FinishReason
from weir.core.sampling import SamplingParams, TokenLogprobs
from weir.engine.messages import Arrival, CancelSequence, SequenceEnded, SequenceKey, TokenSampled
from weir.wire.v1 import types_pb2, worker_pb2
from weir.worker.requests.request_tables import Resume
from weir.worker.requests.streams import GatewayStream

OTHER = "gateway-1-11111111"
CLAIM = SequenceKey(KEY.request_id, Attempt(1001))
KEEP_S, GONE_S = 30.0, 5.0


def keyed(found: Arrival, keep_s: float = KEEP_S) -> Arrival:
    return replace(found, params=replace(found.params, keep_ms=int(keep_s * 1000)))


def running(bench: Bench, found: Arrival | None = None, num_tokens: int = 3) -> None:
    """Of the bench's gateway, with so many tokens, the first of which was handed over."""
    assert bench.manager.try_take_over(found or keyed(arrival()))
    for index in range(1, num_tokens):
        bench.manager.on_event(TokenSampled(KEY, index, 100 + index), step=index)


def lose_gateway(bench: Bench, after_s: float = GONE_S) -> None:
    bench.manager.on_stream_end(bench.stream)
    bench.clock.advance(after_s)
    bench.manager.sweep()


async def claim(bench: Bench, next_index: int = 0, key: SequenceKey = CLAIM) -> GatewayStream:
    stream = bench.hub.get(OTHER) or bench.hub.attach(OTHER)
    bench.manager.resume(stream, Resume(key, next_index, awaits_hand_off=True, claims=True))
    return stream


async def update_of(stream: GatewayStream) -> worker_pb2.SequenceUpdate:
    (update,) = (await frame_of(stream)).updates
    return update


def cancelled(bench: Bench) -> list[SequenceKey]:
    return [command.key for command in bench.posted if isinstance(command, CancelSequence)]


async def test_of_a_gateway_that_has_gone_only_what_is_to_be_kept_runs_on() -> None:
    bench = Bench(takes_hand_offs=True)
    running(bench)
    other = SequenceKey(f"{1:032x}", Attempt())
    assert bench.manager.try_take_over(arrival(1))
    lose_gateway(bench)
    assert cancelled(bench) == [other]
    assert bench.manager.num_unclaimed == 1


async def test_it_is_kept_no_longer_than_it_was_asked_to_be() -> None:
    bench = Bench(takes_hand_offs=True)
    running(bench)
    lose_gateway(bench)
    bench.clock.advance(KEEP_S - 0.1)
    bench.manager.sweep()
    assert cancelled(bench) == []
    bench.clock.advance(0.1)
    bench.manager.sweep()
    assert cancelled(bench) == [KEY]
    assert await sends_nothing(await claim(bench)), "it is being cancelled, and may still come by hand-off"


async def test_who_claims_it_gets_all_tokens_and_all_that_follow_under_its_own_dispatch() -> None:
    bench = Bench(takes_hand_offs=True)
    running(bench)
    lose_gateway(bench)
    bench.manager.on_event(TokenSampled(KEY, 3, 103), step=4)
    stream = await claim(bench)
    update = await update_of(stream)
    assert (update.claimed, update.attempt.dispatch, list(update.token_ids)) == (True, 1001, [9, 101, 102, 103])
    bench.manager.on_event(TokenSampled(KEY, 4, 104), step=5)
    bench.manager.on_event(SequenceEnded(KEY, FinishReason.LENGTH), step=5)
    update = await update_of(stream)
    assert (update.claimed, update.attempt.dispatch, update.first_index) == (False, 1001, 4)
    assert update.finish_reason == types_pb2.FINISH_REASON_LENGTH
    assert (bench.manager.num_claimed, bench.manager.num_unclaimed) == (1, 0)


async def test_one_that_ended_meanwhile_is_told_with_its_end_as_long_as_it_would_be_kept() -> None:
    bench = Bench(takes_hand_offs=True)
    running(bench)
    lose_gateway(bench)
    bench.manager.on_event(SequenceEnded(KEY, FinishReason.STOP), step=4)
    bench.clock.advance(KEEP_S - 1)
    bench.manager.sweep()
    update = await update_of(await claim(bench))
    assert (list(update.token_ids), update.finish_reason) == ([9, 101, 102], types_pb2.FINISH_REASON_STOP)


async def test_an_end_that_its_own_gateway_took_is_forgotten_as_ever() -> None:
    bench = Bench(takes_hand_offs=True)
    running(bench)
    bench.manager.on_event(SequenceEnded(KEY, FinishReason.STOP), step=4)
    await frame_of(bench.stream)
    bench.clock.advance(10)
    bench.manager.sweep()
    assert await sends_nothing(await claim(bench))


async def test_one_without_a_token_yet_is_claimed_too() -> None:
    bench = Bench(takes_hand_offs=True)
    assert bench.manager.try_start(bench.stream, keyed(Arrival(params((1, 2)))))
    update = await update_of(await claim(bench))
    assert (update.claimed, list(update.token_ids)) == (True, [])


async def test_a_claim_waits_for_a_sequence_that_is_handed_over_or_adopted_later() -> None:
    """Under the dispatch of whoever started it, as its record says."""
    for attempt in (Attempt(1, 0), Attempt(2, 3)):
        bench = Bench(takes_hand_offs=True)
        stream = await claim(bench)
        assert await sends_nothing(stream)
        found = keyed(arrival())
        assert bench.manager.try_take_over(replace(found, params=replace(found.params, attempt=attempt)))
        update = await update_of(stream)
        assert (update.claimed, list(update.token_ids)) == (True, [9])
        assert (update.attempt.dispatch, update.attempt.adoption) == (1001, attempt.adoption)


async def test_who_has_claimed_it_commands_it_by_its_own_dispatch() -> None:
    bench = Bench(takes_hand_offs=True)
    running(bench)
    stream = await claim(bench)
    await frame_of(stream)
    bench.manager.resume(stream, Resume(CLAIM, 1, claims=True))
    assert (await update_of(stream)).first_index == 1
    bench.manager.cancel(stream, CLAIM)
    assert cancelled(bench) == [KEY]
    bench.manager.on_event(SequenceEnded(KEY, FinishReason.CANCELLED), step=9)
    update = await update_of(stream)
    assert (update.attempt.dispatch, update.finish_reason) == (1001, types_pb2.FINISH_REASON_CANCELLED)


async def test_a_gateway_that_lives_is_told_that_another_one_has_its_sequence_and_disturbs_it_no_more() -> None:
    bench = Bench(takes_hand_offs=True)
    running(bench)
    stream = await claim(bench)
    assert error_of(await update_of(bench.stream)) == worker_pb2.WORKER_ERROR_REASON_UNKNOWN_REQUEST
    await frame_of(stream)
    bench.manager.resume(bench.stream, Resume(KEY, 0))
    assert error_of(await update_of(bench.stream)) == worker_pb2.WORKER_ERROR_REASON_UNKNOWN_REQUEST
    bench.manager.cancel(bench.stream, KEY)
    assert (await update_of(bench.stream)).finish_reason == types_pb2.FINISH_REASON_CANCELLED
    assert bench.manager.is_wanted(KEY), "should it be adopted here"
    bench.manager.on_stream_end(bench.stream)
    bench.clock.advance(KEEP_S + GONE_S)
    bench.manager.sweep()
    assert cancelled(bench) == []
    bench.manager.on_event(TokenSampled(KEY, 3, 103), step=4)
    assert list((await update_of(stream)).token_ids) == [103]


async def test_the_next_gateway_claims_it_from_the_one_that_has() -> None:
    bench = Bench(takes_hand_offs=True)
    running(bench)
    await frame_of(await claim(bench))
    lose_gateway(bench)
    third = bench.hub.attach("gateway-2-22222222")
    bench.manager.resume(
        third, Resume(SequenceKey(KEY.request_id, Attempt(2001)), 2, awaits_hand_off=True, claims=True)
    )
    update = await update_of(third)
    assert (update.attempt.dispatch, update.first_index, list(update.token_ids)) == (2001, 2, [102])


async def test_a_cancel_of_a_claim_frees_what_comes_later_under_an_earlier_dispatch() -> None:
    bench = Bench(takes_hand_offs=True)
    stream = await claim(bench)
    bench.manager.cancel(stream, CLAIM)
    assert not bench.manager.try_take_over(keyed(arrival()))
    assert bench.manager.num_expected == 0


@pytest.mark.parametrize("why", ["it has no key", "its log-probabilities are lost", "it is being cancelled"])
async def test_what_cannot_be_gone_on_with_is_not_claimed(why: str) -> None:
    bench = Bench(takes_hand_offs=True)
    found = arrival() if why == "it has no key" else keyed(arrival())
    if why == "its log-probabilities are lost":
        sampling = SamplingParams(logprobs=1)
        unknown = (TokenLogprobs.unknown(9),)
        found = replace(found, params=replace(found.params, sampling=sampling), output_logprobs=unknown)
    running(bench, found, num_tokens=1)
    if why == "it is being cancelled":
        bench.manager.cancel(bench.stream, KEY)
    stream = await claim(bench)
    assert await sends_nothing(stream)
    assert bench.manager.num_claimed == 0


async def test_lost_log_probabilities_of_tokens_that_the_gateway_has_do_not_matter_whenever_it_comes() -> None:
    sampling, unknown = SamplingParams(logprobs=1), (TokenLogprobs.unknown(9),)
    found = replace(keyed(arrival()), output_logprobs=unknown)
    found = replace(found, params=replace(found.params, sampling=sampling))
    for next_index, num_claimed in ((0, 0), (1, 1)):
        for is_first in (True, False):
            bench = Bench(takes_hand_offs=True)
            if is_first:
                await claim(bench, next_index)
            assert bench.manager.try_take_over(found)
            await claim(bench, next_index)
            assert bench.manager.num_claimed == num_claimed


async def test_a_gateway_that_is_back_in_time_goes_on_with_its_own() -> None:
    bench = Bench(takes_hand_offs=True)
    running(bench)
    lose_gateway(bench)
    back = bench.hub.attach(GATEWAY)
    bench.manager.resume(back, Resume(KEY, 1))
    assert list((await update_of(back)).token_ids) == [101, 102]
    bench.clock.advance(KEEP_S)
    bench.manager.sweep()
    assert cancelled(bench) == []


async def test_a_claim_whose_answer_was_lost_with_its_stream_is_answered_again() -> None:
    bench = Bench(takes_hand_offs=True)
    running(bench)
    stream = await claim(bench)
    assert (await update_of(stream)).claimed
    bench.manager.on_stream_end(stream)
    again = await update_of(await claim(bench, next_index=3))
    assert (again.claimed, list(again.token_ids)) == (True, [])
    assert bench.manager.num_claimed == 1


async def test_what_is_to_be_cancelled_once_the_engine_takes_it_is_not_claimed() -> None:
    bench = Bench(takes_hand_offs=True)
    running(bench)
    bench.is_inbox_full = True
    bench.manager.cancel(bench.stream, KEY)
    assert await sends_nothing(await claim(bench))
    assert bench.manager.num_claimed == 0

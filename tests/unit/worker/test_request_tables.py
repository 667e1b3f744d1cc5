"""What a worker remembers: log-probabilities go with their tokens, and again on a resume; cancels stay in force."""

from weir.core.clock import ManualClock
from weir.core.life import Attempt
from weir.core.sampling import TokenLogprobs
from weir.engine.messages import SequenceKey
from weir.rpc.conversions import logprobs_from_pb
from weir.wire.v1 import worker_pb2
from weir.worker.requests.request_tables import CancelledRequests, OutputCollector

KEY = SequenceKey("a" * 32, Attempt(1))
LOGPROBS = [TokenLogprobs(index, -index / 8, 1) for index in range(6)]


def collected(num_tokens: int, num_prompt: int = 0) -> OutputCollector:
    collector = OutputCollector(KEY, "gateway", next_index=0)
    if num_prompt:
        collector.add_prompt_logprobs(1, LOGPROBS[:num_prompt])
    for index in range(num_tokens):
        collector.add_token(index, index, LOGPROBS[index])
    return collector


def logprobs_of(update: worker_pb2.SequenceUpdate) -> list[TokenLogprobs]:
    return [logprobs_from_pb(entry) for entry in update.logprobs]


def prompt_logprobs_of(update: worker_pb2.SequenceUpdate) -> list[TokenLogprobs]:
    return [logprobs_from_pb(entry) for entry in update.prompt_logprobs]


def test_each_update_has_those_of_its_own_tokens() -> None:
    collector = collected(2)
    assert logprobs_of(collector.take_update(100)) == LOGPROBS[:2]
    collector.add_token(2, 2, LOGPROBS[2])
    update = collector.take_update(100)
    assert (update.first_index, list(update.token_ids), logprobs_of(update)) == (2, [2], [LOGPROBS[2]])


def test_an_update_that_is_cut_short_has_no_more_of_them_than_tokens() -> None:
    collector = collected(5)
    assert logprobs_of(collector.take_update(3)) == LOGPROBS[:3]
    assert logprobs_of(collector.take_update(3)) == LOGPROBS[3:5]


def test_a_gateway_that_asks_again_gets_them_again() -> None:
    collector = collected(3, num_prompt=4)
    collector.take_update(100)
    assert not collector.has_updates
    collector.resume(1)
    update = collector.take_update(100)
    assert (update.first_index, logprobs_of(update)) == (1, LOGPROBS[1:3])
    assert (update.first_prompt_index, prompt_logprobs_of(update)) == (1, LOGPROBS[:4])


def test_those_of_the_prompt_are_sent_without_a_token_and_once() -> None:
    collector = collected(0, num_prompt=2)
    has_updates = [collector.has_updates]
    update = collector.take_update(100)
    assert (list(update.token_ids), prompt_logprobs_of(update)) == ([], LOGPROBS[:2])
    has_updates.append(collector.has_updates)
    assert has_updates == [True, False]
    collector.add_prompt_logprobs(3, LOGPROBS[2:4])
    update = collector.take_update(100)
    assert (update.first_prompt_index, prompt_logprobs_of(update)) == (3, LOGPROBS[2:4])


def test_a_cancel_counts_for_older_dispatches_and_all_adoptions_of_its_own_and_not_for_newer_ones() -> None:
    cancelled = CancelledRequests(ManualClock(), ttl_s=60, max_entries=10)
    cancelled.put(SequenceKey("a", Attempt(2)))
    cancelled.put(SequenceKey("a", Attempt(1)))
    assert cancelled.covers(SequenceKey("a", Attempt(1)))
    assert cancelled.covers(SequenceKey("a", Attempt(2)))
    assert cancelled.covers(SequenceKey("a", Attempt(2, 1)))
    assert not cancelled.covers(SequenceKey("a", Attempt(3)))


def test_cancelled_requests_are_bounded() -> None:
    cancelled = CancelledRequests(ManualClock(), ttl_s=60, max_entries=3)
    for name in "abcd":
        cancelled.put(SequenceKey(name, Attempt()))
    assert len(cancelled) == 3
    assert not cancelled.covers(SequenceKey("a", Attempt()))

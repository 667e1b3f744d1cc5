"""The worker that computes nothing gives every sequence its tokens, in order; processor time is read from /proc."""

import asyncio
import os
import time

import pytest

from benchmarks.wire.clients import StreamsReceived
from benchmarks.wire.gateway_cost import CostRound, cost_of, row
from benchmarks.wire.measure import WireRound, cpu_times_s
from benchmarks.wire.null_worker import NullEngine
from benchmarks.wire.step_tokens import age_s, token_of_step
from weir.wire.v1 import types_pb2, worker_pb2


async def test_each_sequence_gets_one_token_a_step_until_its_end_and_none_after() -> None:
    engine = NullEngine(0.0)
    tokens: dict[str, int] = {"a": 0, "b": 0}
    for name, max_tokens in (("a", 3), ("b", 5)):
        engine.start(worker_pb2.Start(request_id=name, attempt=types_pb2.Attempt(dispatch=2), max_tokens=max_tokens))
    ended = []
    for step in range(1, 6):
        frame = await engine.next_frame()
        assert frame.step == step
        for update in frame.updates:
            assert (update.first_index, len(update.token_ids)) == (tokens[update.request_id], 1)
            assert update.attempt.dispatch == 2
            tokens[update.request_id] += 1
            if update.finish_reason == types_pb2.FINISH_REASON_LENGTH:
                ended.append((step, update.request_id))
    assert ended == [(3, "a"), (5, "b")]


async def test_a_sequence_that_comes_after_a_rest_begins_with_the_next_step() -> None:
    engine = NullEngine(0.002)
    for name in ("first", "second"):
        engine.start(worker_pb2.Start(request_id=name, max_tokens=200))
        frame = await engine.next_frame()
        (update,) = frame.updates
        assert update.token_ids[-1] == token_of_step(frame.step)
        assert len(update.token_ids) < 50, "a rest of a hundred steps counts as steps"
        engine.cancel(name)
        await asyncio.sleep(0.2)


@pytest.mark.parametrize("num_steps", [0, 1, 29_998])
def test_a_token_says_how_old_it_is(num_steps: int) -> None:
    step = 4_711_000
    assert age_s(token_of_step(step), 0.25, (step + num_steps) * 0.25 + 0.1) == pytest.approx(num_steps * 0.25 + 0.1)


def test_a_token_that_comes_before_its_step_was_due_is_not_a_cycle_old() -> None:
    assert age_s(token_of_step(4_711_000), 0.25, 4_711_000 * 0.25 - 0.001) == pytest.approx(-0.001)


def test_processor_time_is_that_of_the_process_and_one_that_is_gone_is_named() -> None:
    before_s = cpu_times_s({"me": os.getpid()})["me"]
    began_s = time.process_time()
    while time.process_time() - began_s < 0.05:
        pass
    assert cpu_times_s({"me": os.getpid()})["me"] - before_s >= 0.05
    with pytest.raises(RuntimeError, match="gone"):
        cpu_times_s({"gone": 2**22 + 1})


def answers_of(us_a_token: float, num_tokens: int) -> WireRound:
    received = StreamsReceived(num_tokens, num_tokens // 2, [0.01, 0.03], [0.004] * 9, 1.0)
    return WireRound({"gateway": us_a_token, "scheduler": 1e6}, received)


def test_what_tokens_cost_the_gateway_is_what_answers_cost_beyond_requests_of_two_tokens() -> None:
    short, answers = answers_of(500.0, 200), answers_of(30.0, 5_000)  # 1 ms a request; 0.15 s, of which 10 requests
    cost = cost_of(short, 100, answers, 10)
    assert cost.ms_a_request == pytest.approx(1.0)
    assert cost.us_a_token == pytest.approx((0.15 - 0.01) * 1e6 / 4_980)


def test_a_row_has_the_medians_and_the_spread_of_the_rounds() -> None:
    rounds = [CostRound(us, 1.5, answers_of(us, 1_000)) for us in (20.0, 30.0, 25.0)]
    told = row("grpc, plain", 64, rounds)
    assert told.startswith("| grpc, plain | 64 | 25.0 (20.0 to 30.0) | 40,000 | 1.50 (1.50 to 1.50) | 2.0 | 4 (4 to 4)")
    assert row("grpc, plain", 1, rounds[:1]).startswith("| grpc, plain | 1 | 20.0 | 50,000 | 1.50 | 2.0 | 4, 4 |")

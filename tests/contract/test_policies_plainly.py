"""Each policy's order picks whom its rule names, looked up plainly among all that wait: over long random runs with
thousands of changes, so that what orders do with those that left long ago does not show."""

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract.plain_orders import (
    GUARD,
    Bucketed,
    Guarded,
    HighestRatio,
    PlainQueue,
    PrefillRate,
    Rank,
    Ranked,
    Relegating,
)
from tests.contract.policy_requests import waiting

from weir.policy.registry import PolicySpec, policy_names
from weir.policy.seams import Order, OrderQueue, Waiting

GUARDED = ("shortest-prompt", "ltr", "srtf", "hybrid", "slai")
NUM_STEPS = 700


def plain_queues(name: str, rank: Rank) -> Callable[[], PlainQueue]:
    rate = PrefillRate()
    inner: dict[str, Callable[[], Ranked]] = {
        "magnus": lambda: HighestRatio(rank),
        "hybrid": lambda: Relegating(rank, rate),
        "bucketed": lambda: Bucketed(rank),
    }
    make = inner.get(name, lambda: Ranked(rank))
    return (lambda: Guarded(make())) if name in GUARDED else make


def a_request(number: int, now_s: float, choose: random.Random) -> Waiting:
    """Few lengths and times, so that there are ties; some come as if they had come before."""
    arrived_at_s = now_s - choose.choice([0.0, 0.0, 0.0, 4.0])
    return waiting(
        f"r{choose.randrange(10**6):06}-{number}",
        arrived_at_s,
        prompt=choose.choice([1, 100, 129, 900, 5000]),
        output=choose.choice([None, 10.0, 10.0, 90.0, 400.5]),
        score=choose.choice([None, -1.0, 2.0, 2.5]),
        due_s=choose.choice([math.inf, arrived_at_s + 0.3, arrived_at_s + 3, arrived_at_s + 20]),
    )


def run(order: Order, new_plain: Callable[[], PlainQueue], choose: random.Random) -> int:
    """Two queues of one order beside two plain ones. Returns how many picks were the same."""
    pairs: list[tuple[OrderQueue, PlainQueue]] = [(order.new_queue(), new_plain()) for _ in range(2)]
    now_s, num_picks = 100.0, 0
    running: list[Waiting] = []
    here: dict[str, Waiting] = {}
    share_of_adds = 0.85
    for step in range(NUM_STEPS):
        if step % 100 == 0:
            share_of_adds = choose.choice([0.85, 0.5, 0.2])  # some are picked at any of them
        now_s += choose.choice([0.0, 0.01, 0.2])
        queue, plain = choose.choice(pairs)
        action = choose.random()
        if action < share_of_adds:
            request = a_request(step, now_s, choose)
            here[request.request_id] = request
            queue.add(request)
            plain.add(request)
        elif action < share_of_adds + 0.1 and len(queue):
            leaving = choose.choice(sorted(queue.ids()))
            queue.discard(leaving)
            plain.discard(leaving)
        elif (request_id := queue.try_peek(now_s)) is not None:
            queue.take(request_id, now_s)
            assert request_id == plain.try_peek(now_s)
            plain.take(request_id, now_s)
            running.append(here[request_id])
            num_picks += 1
        if running and choose.random() < 0.3:
            order.finished(running.pop(choose.randrange(len(running))), choose.randrange(1, 500), now_s)
        assert queue.try_peek(now_s) == plain.try_peek(now_s)
    return num_picks


@pytest.mark.parametrize("name", policy_names())
@given(seed=st.integers(0, 2**32))
@settings(max_examples=8, deadline=None)
def test_the_next_one_is_whom_the_rule_names_among_all_that_wait(name: str, seed: int) -> None:
    order = PolicySpec(name, GUARD if name in GUARDED else {}).make().order
    assert run(order, plain_queues(name, order.rank), random.Random(seed)) > 10

"""However many become late at once, they are relegated as one, and go in the order in which they would have gone."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract.opcodes import num_opcodes
from tests.contract.plain_orders import PrefillRate, Relegating
from tests.contract.policy_requests import waiting

from weir.policy.registry import PolicySpec
from weir.policy.seams import Order, OrderQueue


def hybrid() -> Order:
    return PolicySpec("hybrid", {"starvation": False}).make().order


def queue_of_late_ones(num_late: int) -> OrderQueue:
    """At 50 s all are late; `timely` is not."""
    queue = hybrid().new_queue()
    queue.add(waiting("timely", 0.0, due_s=1e6))
    for number in range(num_late):
        queue.add(waiting(f"late{number:05}", 0.0, due_s=10.0 + number / num_late))
    return queue


def test_each_of_a_thousand_that_became_late_costs_a_few_steps_and_none_later() -> None:
    queue = queue_of_late_ones(1000)
    assert num_opcodes(lambda: queue.try_peek(50.0)) < 25 * 1000
    assert queue.try_peek(50.0) == "timely"
    queue.take("timely", 50.0)
    costs = []
    for number in range(1000):
        assert queue.try_peek(50.0) == f"late{number:05}"
        costs.append(num_opcodes(lambda number=number: queue.take(f"late{number:05}", 50.0)))  # type: ignore[misc]
    assert max(costs) < 300
    assert len(queue) == 0
    assert queue.try_peek(50.0) is None


@given(seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_runs_of_late_ones_are_merged_in_the_order_of_the_rule(seed: int) -> None:
    """Several times most of those that wait become late together; some leave out of the midst of their run."""
    choose, order = random.Random(seed), hybrid()
    queue, plain = order.new_queue(), Relegating(order.rank, PrefillRate())
    now_s = 100.0
    for round_number in range(6):
        for number in range(40):
            request_id, due_s = f"r{round_number}-{number:02}", now_s + choose.choice([0.5, 1.0, 2.0, 60.0])
            request = waiting(request_id, now_s, prompt=choose.choice([1, 100, 4000]), due_s=due_s)
            queue.add(request)
            plain.add(request)
        now_s += 5.0
        for _ in range(35):
            first = queue.try_peek(now_s)
            assert first is not None
            assert first == plain.try_peek(now_s)
            if choose.random() < 0.5:
                queue.take(first, now_s)
                plain.take(first, now_s)
            else:
                leaving = choose.choice(sorted(queue.ids()))
                queue.discard(leaving)
                plain.discard(leaving)
    assert sorted(queue.ids()) == sorted(plain.waiting)


def test_a_late_one_is_in_the_queue_once() -> None:
    queue = queue_of_late_ones(3)
    queue.try_peek(50.0)
    with pytest.raises(ValueError, match="late00001 is in the queue already"):
        queue.add(waiting("late00001"))
    queue.discard("unknown")
    assert len(queue) == 4

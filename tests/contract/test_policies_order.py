"""One contract over the orders of all policies."""

import math
import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract.opcodes import num_opcodes
from tests.contract.policy_requests import arrivals, waiting

from weir.policy.registry import PolicySpec, policy_names
from weir.policy.seams import Order, OrderQueue, Waiting

every_policy = pytest.mark.parametrize("name", policy_names())
STARVING = ("shortest-prompt", "ltr", "srtf", "hybrid", "slai")
"""Orders that let some wait for ever if their starvation control is off."""
MAX_PICKS = 1500


def drained(queue: OrderQueue, now_s: float) -> list[str]:
    """In the order in which a queue gives all its requests away, one every 10 ms."""
    taken = []
    while (request_id := queue.try_peek(now_s)) is not None:
        queue.take(request_id, now_s)
        taken.append(request_id)
        now_s += 0.01
    return taken


def filled(order: Order, requests: Sequence[Waiting]) -> OrderQueue:
    queue = order.new_queue()
    for request in requests:
        queue.add(request)
    return queue


@every_policy
@given(requests=arrivals(), data=st.data())
@settings(max_examples=25, deadline=None)
def test_while_anybody_waits_somebody_is_next_and_each_is_taken_once(
    name: str, requests: list[Waiting], data: st.DataObject
) -> None:
    order = PolicySpec(name).make().order
    queue = order.new_queue()
    here: set[str] = set()
    gone: list[str] = []
    now_s = 0.0
    for request in requests:
        now_s = max(now_s, request.arrived_at_s) + 0.01
        queue.add(request)
        here.add(request.request_id)
        action = data.draw(st.sampled_from(["take", "discard", "finish", "nothing"]))
        if action == "take":
            request_id = queue.try_peek(now_s)
            assert request_id in here
            assert queue.try_peek(now_s) == request_id
            queue.take(request_id, now_s)
            here.remove(request_id)
            gone.append(request_id)
        elif action == "discard":
            queue.discard("unknown")
            queue.discard(request.request_id)
            here.remove(request.request_id)
        elif action == "finish":
            order.finished(request, 7, now_s)
        assert sorted(queue.ids()) == sorted(here)
        assert len(queue) == len(here)
    others = drained(queue, now_s)
    assert sorted(others) == sorted(here)
    assert len(queue) == 0
    assert len({*gone, *others}) == len(gone) + len(others)


@every_policy
@given(requests=arrivals(), seed=st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_the_order_in_which_simultaneous_requests_are_added_does_not_matter(
    name: str, requests: list[Waiting], seed: random.Random
) -> None:
    shuffled = list(requests)
    seed.shuffle(shuffled)
    shuffled.sort(key=lambda request: request.arrived_at_s)
    end_s = requests[-1].arrived_at_s + 1
    assert drained(filled(PolicySpec(name).make().order, requests), end_s) == drained(
        filled(PolicySpec(name).make().order, shuffled), end_s
    )


@every_policy
def test_equals_go_by_arrival_then_by_id(name: str) -> None:
    requests = [waiting("c", 1.0), waiting("b", 2.0), waiting("a", 2.0), waiting("d", 0.5)]
    queue = filled(PolicySpec(name).make().order, sorted(requests, key=lambda request: request.arrived_at_s))
    assert drained(queue, 3.0) == ["d", "c", "a", "b"]


@every_policy
def test_a_request_is_in_a_queue_once(name: str) -> None:
    queue = filled(PolicySpec(name).make().order, [waiting("a")])
    with pytest.raises(ValueError, match="a is in the"):
        queue.add(waiting("a", prompt=5000, output=900.0))


@every_policy
def test_tenants_queues_are_apart(name: str) -> None:
    order = PolicySpec(name).make().order
    one, other = filled(order, [waiting("a")]), order.new_queue()
    other.discard("a")
    assert other.try_peek(0.0) is None
    assert one.try_peek(0.0) == "a"


def picks_until_the_worst_is_taken(name: str, params: Mapping[str, float]) -> int | None:
    """Twenty wait, and whenever one is taken there comes another that each order likes better than the first.

    The hybrid likes nobody less than who is too late already.
    """
    queue = PolicySpec(name, params).make().order.new_queue()
    due_s = 0.1 if name == "hybrid" else math.inf
    queue.add(waiting("worst", 0.0, prompt=5000, output=800.0, score=-9.0, due_s=due_s))
    now_s = 0.0
    for number in range(MAX_PICKS):
        while len(queue) < 20:
            queue.add(waiting(f"{number}-{len(queue)}", now_s, prompt=50, output=20.0, score=9.0, due_s=now_s + 15))
        request_id = queue.try_peek(now_s)
        assert request_id is not None
        if request_id == "worst":
            return number
        queue.take(request_id, now_s)
        now_s += 0.05
    return None


@every_policy
def test_nobody_starves(name: str) -> None:
    assert picks_until_the_worst_is_taken(name, {}) is not None


@pytest.mark.parametrize("name", STARVING)
def test_the_bound_of_starvation_control_is_exact(name: str) -> None:
    assert picks_until_the_worst_is_taken(name, {"threshold_picks": 37, "period": 4}) == 37


@pytest.mark.parametrize("name", STARVING)
def test_without_starvation_control_the_worst_waits_for_ever(name: str) -> None:
    assert picks_until_the_worst_is_taken(name, {"starvation": 0}) is None


@every_policy
def test_a_decision_costs_little_more_with_ten_thousand_than_with_a_hundred(name: str) -> None:
    def cost(num_queued: int) -> int:
        order = PolicySpec(name).make().order
        requests = [
            waiting(f"q{n:05}", n * 0.001, prompt=1 + n * 7919 % 4000, output=1.0 + n * 104729 % 900, score=n % 97 / 10)
            for n in range(num_queued)
        ]
        queue = filled(order, requests)

        def decide() -> None:
            for number in range(20):
                now_s = num_queued * 0.001 + number
                queue.add(waiting(f"new{number}", now_s, prompt=1 + number * 97, output=number * 31.0, score=0.5))
                request_id = queue.try_peek(now_s)
                assert request_id is not None
                queue.take(request_id, now_s)
                order.finished(requests[number], 50, now_s)

        return num_opcodes(decide)

    assert cost(10_000) < 2 * cost(100)

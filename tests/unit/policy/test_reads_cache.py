"""A policy that says that its order reads nothing of what is cached takes the same turns whatever is."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weir.policy.registry import PolicySpec, policy_names
from weir.policy.seams import Waiting

BLIND = [name for name in policy_names() if not PolicySpec(name).make().reads_cache]
SHAPES = st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 500), st.floats(0, 100)), min_size=1, max_size=12)


def turns(name: str, shapes: list[tuple[int, int, float]], *, is_cached: bool) -> list[str]:
    queue = PolicySpec(name).make().order.new_queue()
    for number, (num_tokens, num_output_tokens, due_s) in enumerate(shapes):
        num_uncached = 1 if is_cached else num_tokens
        predicted = float(num_output_tokens)
        queue.add(Waiting(f"r{number}", float(number), num_tokens, num_uncached, 512, due_s, predicted, -predicted))
    order = []
    while (request_id := queue.try_peek(200.0)) is not None:
        queue.take(request_id, 200.0)
        order.append(request_id)
    return order


def test_first_come_first_served_is_one_of_them_and_shortest_prompt_is_not() -> None:
    assert "fcfs" in BLIND
    assert "shortest-prompt" not in BLIND


@pytest.mark.parametrize("name", BLIND)
@settings(max_examples=40, deadline=None)
@given(shapes=SHAPES)
def test_turns_do_not_depend_on_what_is_cached(name: str, shapes: list[tuple[int, int, float]]) -> None:
    assert turns(name, shapes, is_cached=True) == turns(name, shapes, is_cached=False)

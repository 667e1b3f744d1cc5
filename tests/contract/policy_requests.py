"""Requests that wait, for tests of orders."""

import math

from hypothesis import strategies as st

from weir.policy.seams import Waiting


def waiting(
    request_id: str,
    arrived_at_s: float = 0.0,
    *,
    prompt: int = 100,
    output: float | None = None,
    score: float | None = None,
    due_s: float = math.inf,
    max_tokens: int = 1000,
) -> Waiting:
    """One whose prompt is in no cache."""
    return Waiting(request_id, arrived_at_s, prompt, prompt, max_tokens, due_s, output, score)


@st.composite
def arrivals(draw: st.DrawFn, max_size: int = 30) -> list[Waiting]:
    """By arrival; several of an instant, with and without deadlines, predictions and scores."""
    size = draw(st.integers(1, max_size))
    at_s = 0.0
    requests = []
    for number in range(size):
        at_s += draw(st.sampled_from([0.0, 0.0, 0.5, 3.0]))
        request = waiting(
            f"r{number}",
            at_s,
            prompt=draw(st.sampled_from([1, 100, 100, 129, 5000])),
            output=draw(st.sampled_from([None, 10.0, 10.0, 400.5])),
            score=draw(st.sampled_from([None, -1.0, 2.0, 2.0])),
            due_s=draw(st.sampled_from([math.inf, at_s + 0.2, at_s + 20])),
        )
        requests.append(request)
    return requests

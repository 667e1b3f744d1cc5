"""What policies learn from what has ended, and how much of it they keep."""

import pytest
from tests.contract.policy_requests import waiting

from weir.policy import magnus
from weir.policy.estimators import LeastSquares, RecentMean
from weir.policy.magnus import LinearServingTime, MagnusOrder, MagnusParams, make_magnus


class RecordedServingTime(LinearServingTime):
    """Remembers what it was given to learn from."""

    def __init__(self) -> None:
        super().__init__(MagnusParams())
        self.observed: list[tuple[float, float, float]] = []

    def observe(self, num_uncached_tokens: float, num_output_tokens: float, seconds: float) -> None:
        self.observed.append((num_uncached_tokens, num_output_tokens, seconds))


def test_a_mean_is_of_the_latest_values_alone() -> None:
    mean = RecentMean(max_values=3)
    assert mean.value is None
    for value in (1.0, 2.0, 3.0, 4.0, 8.0):
        mean.add(value)
    assert mean.value == pytest.approx(5.0)


def test_a_fit_begins_at_its_prior_and_leaves_it_as_observations_come() -> None:
    """32 of 10, the latest of weight 1, each before it 0.99 times as much: (27.5 * 10 + 1 * 0) / 28.5 = 9.65."""
    fit = LeastSquares((0.0,), scales=(1.0,), decay=0.99)
    assert fit.predict((1.0,)) == 0.0
    for _ in range(32):
        fit.observe((1.0,), 10.0)
    weight = (1 - 0.99**32) / 0.01
    assert fit.predict((1.0,)) == pytest.approx(10 * weight / (weight + 1))


def test_a_request_that_ends_twice_is_learned_from_once() -> None:
    serving_time = RecordedServingTime()
    order = MagnusOrder(MagnusParams(), serving_time)
    order.started("a", 1.0)
    for now_s in (3.0, 99.0):
        order.finished(waiting("a", prompt=70), 7, now_s)
    order.finished(waiting("never started"), 7, 99.0)
    assert serving_time.observed == [(70, 7, 2.0)]


def test_of_requests_that_never_end_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(magnus, "_MAX_STARTED", 3)
    serving_time = RecordedServingTime()
    order = MagnusOrder(MagnusParams(), serving_time)
    for number in range(5):
        order.started(f"r{number}", float(number))
    for number in range(5):
        order.finished(waiting(f"r{number}"), 1, 10.0)
    assert [seconds for _, _, seconds in serving_time.observed] == [8.0, 7.0, 6.0]


def test_a_serving_time_of_nothing_is_still_a_time() -> None:
    order = make_magnus(MagnusParams(prefill_token_ms=0, decode_token_ms=0)).order
    queue = order.new_queue()
    queue.add(waiting("a"))
    assert queue.try_peek(1.0) == "a"
    assert order.rank(waiting("a")) > 0

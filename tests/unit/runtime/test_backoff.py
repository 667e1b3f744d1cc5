"""Delays between restarts."""

from hypothesis import given
from hypothesis import strategies as st

from weir.runtime.stack.backoff import Backoff, BackoffPolicy

POLICY = BackoffPolicy(first_s=0.5, longest_s=10.0, healthy_s=30.0)


def test_delays_double_up_to_the_longest() -> None:
    backoff = Backoff(POLICY)
    assert [backoff.next_delay_s(0.0) for _ in range(7)] == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_a_process_that_was_healthy_for_a_while_starts_anew() -> None:
    backoff = Backoff(POLICY)
    for _ in range(5):
        backoff.next_delay_s(29.9)
    assert backoff.next_delay_s(29.9) == 10.0
    assert [backoff.next_delay_s(30.0), backoff.next_delay_s(0.0)] == [0.5, 1.0]


@given(st.lists(st.floats(0, 1e6), max_size=200))
def test_a_delay_is_never_zero_nor_longer_than_the_longest(ready_for: list[float]) -> None:
    backoff = Backoff(POLICY)
    assert all(0.5 <= backoff.next_delay_s(seconds) <= 10.0 for seconds in ready_for)


def test_years_of_failures_do_not_overflow() -> None:
    backoff = Backoff(POLICY)
    assert {backoff.next_delay_s(0.0) for _ in range(3000)} == {0.5, 1.0, 2.0, 4.0, 8.0, 10.0}

"""Delays between attempts."""

from hypothesis import given
from hypothesis import strategies as st

from weir.core.backoff import Backoff


def test_delays_double_up_to_the_longest_and_begin_anew_after_a_reset() -> None:
    backoff = Backoff(0.5, 10.0)
    assert [backoff.next_delay_s() for _ in range(7)] == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    backoff.reset()
    assert [backoff.next_delay_s(), backoff.next_delay_s()] == [0.5, 1.0]


@given(st.lists(st.booleans(), max_size=3000))
def test_a_delay_is_never_shorter_than_the_first_nor_longer_than_the_longest(holds: list[bool]) -> None:
    backoff = Backoff(0.5, 10.0)
    for held in holds:
        assert 0.5 <= backoff.next_delay_s() <= 10.0
        if held:
            backoff.reset()

"""How fast one source is refused."""

from hypothesis import given
from hypothesis import strategies as st

from weir.core.clock import ManualClock
from weir_gateway.refusal_pace import RefusalPace


@given(st.lists(st.floats(0.0, 0.5), min_size=30, max_size=200))
def test_who_waits_for_each_refusal_has_ten_a_second_and_twenty_at_once(pauses_s: list[float]) -> None:
    clock = ManualClock()
    pace = RefusalPace(clock)
    for num_before, pause_s in enumerate(pauses_s):
        clock.advance(pause_s)
        wait_s = pace.wait_s("a")
        clock.advance(wait_s)
        assert num_before + 1 <= 20 + 10 * clock.now_s() + 1e-6


@given(st.integers(1, 500))
def test_nobody_waits_longer_than_two_seconds_however_many_are_refused(num: int) -> None:
    pace = RefusalPace(ManualClock())
    assert max(pace.wait_s("a") for _ in range(num)) <= 2.0 + 1e-9


def test_sources_do_not_wait_for_one_another_and_are_forgotten_when_they_rest() -> None:
    clock = ManualClock()
    pace = RefusalPace(clock)
    for _ in range(100):
        pace.wait_s("a")
    assert pace.wait_s("b") == 0
    assert pace.wait_s("a") > 0
    clock.advance(10)
    assert pace.wait_s("a") == 0

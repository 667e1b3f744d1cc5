"""Attempts, the life of a request, clocks and delays, what is shown of a URL."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.core.clock import Backoff, ManualClock
from weir.core.credentials import masked_url
from weir.core.life import Attempt, IllegalTransition, Phase, check_transition

attempts = st.builds(Attempt, dispatch=st.integers(0, 9), adoption=st.integers(0, 9))


@given(attempts, attempts)
def test_a_dispatch_outweighs_any_number_of_adoptions(one: Attempt, other: Attempt) -> None:
    assert (one < other) == ((one.dispatch, one.adoption) < (other.dispatch, other.adoption))


@given(st.lists(st.sampled_from(Phase), max_size=12))
def test_no_path_of_allowed_transitions_passes_a_terminal_phase(wanted: list[Phase]) -> None:
    phase = Phase.RECEIVED
    for following in wanted:
        if phase.is_terminal:
            with pytest.raises(IllegalTransition):
                check_transition("r", phase, following)
            continue
        try:
            check_transition("r", phase, following)
        except IllegalTransition:
            continue
        phase = following


@pytest.mark.parametrize("phase", [phase for phase in Phase if not phase.is_terminal])
def test_a_request_can_end_badly_from_every_phase(phase: Phase) -> None:
    for end in (Phase.CANCELLED, Phase.FAILED):
        check_transition("r", phase, end)


def test_a_manual_clock_goes_only_forward() -> None:
    clock = ManualClock(5.0)
    clock.advance(1.5)
    assert clock.now_s() == 6.5
    with pytest.raises(ValueError, match="backwards"):
        clock.advance(-1)


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


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nats://127.0.0.1:4222", "nats://127.0.0.1:4222"),
        ("nats://user:secret@host:4222", "nats://***@host:4222"),
        ("tls://token@host", "tls://***@host"),
        ("user:secret@host:4222", "***@host:4222"),
        ("nats://user:s@cr/e:t://@[::1]:4222", "nats://***@[::1]:4222"),
        ("nats://a:secret@one:1,nats://b:secret@two:2", "nats://***@two:2"),
        ("", ""),
    ],
)
def test_a_url_is_shown_without_its_credentials(url: str, shown: str) -> None:
    assert masked_url(url) == shown


@given(st.text(), st.text())
def test_no_password_is_shown_whatever_is_in_it(user: str, password: str) -> None:
    assert masked_url(f"nats://{user}:{password}@host:1") == "nats://***@host:1"

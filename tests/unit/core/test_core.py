"""Attempts, the life of a request, the manual clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.core.attempt import Attempt
from weir.core.clock import ManualClock
from weir.core.life import IllegalTransition, Phase, check_transition

attempts = st.builds(Attempt, dispatch=st.integers(0, 9), adoption=st.integers(0, 9))


@given(attempts, attempts)
def test_a_dispatch_outweighs_any_number_of_adoptions(one: Attempt, other: Attempt) -> None:
    assert (one < other) == ((one.dispatch, one.adoption) < (other.dispatch, other.adoption))


@given(st.lists(st.sampled_from(Phase), max_size=12))
def test_no_path_of_allowed_transitions_passes_a_terminal_phase(output_options: list[Phase]) -> None:
    phase = Phase.RECEIVED
    for wish in output_options:
        if phase.is_terminal:
            with pytest.raises(IllegalTransition):
                check_transition("r", phase, wish)
            continue
        try:
            check_transition("r", phase, wish)
        except IllegalTransition:
            continue
        phase = wish


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

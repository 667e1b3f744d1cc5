"""The phases of a request: without a gap, the longest of them, and what it waited for."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.core.life import Phase
from weir.telemetry.request_record import Mark, PhaseShare, Shares, longest_of, phases_of

SPLIT = (
    Mark(Phase.RECEIVED, 10.5),
    Mark(Phase.QUEUED, 10.6),
    Mark(Phase.GRANTED, 12.0),
    Mark(Phase.PREFILLING, 12.1, worker_id="prefill-0"),
    Mark(Phase.HANDING_OFF, 12.9, worker_id="decode-0"),
    Mark(Phase.DECODING, 13.0, worker_id="decode-0"),
    Mark(Phase.FINISHED, 14.0),
)


def test_a_request_goes_through_each_phase_once_and_what_it_is_in_queue_is_one_phase() -> None:
    phases = phases_of(10.0, SPLIT, 14.0, {})
    assert [(phase.name, phase.start_ms, phase.duration_ms, phase.worker_id) for phase in phases] == [
        ("tokenize", 0.0, 500.0, ""),
        ("queue", 500.0, 1500.0, ""),
        ("start", 2000.0, 100.0, ""),
        ("prefill", 2100.0, 800.0, "prefill-0"),
        ("hand_off", 2900.0, 100.0, "decode-0"),
        ("decode", 3000.0, 1000.0, "decode-0"),
    ]
    assert (longest_of(phases).name, longest_of(phases).cause) == ("queue", "waiting for a grant")


@pytest.mark.parametrize(
    ("shares", "cause"),
    [
        ((), "computing tokens"),
        ((PhaseShare("swapped_out", 400.0),), "computing tokens"),
        ((PhaseShare("swapped_out", 400.0), PhaseShare("waiting", 300.0)), "swapped out for others"),
        ((PhaseShare("moving", 900.0), PhaseShare("waiting", 50.0)), "moving to another worker"),
        ((PhaseShare("paused", 501.0),), "paused for more urgent ones"),
        ((PhaseShare("waiting", 600.0), PhaseShare("paused", 0.0)), "waiting for a place in a step"),
    ],
)
def test_a_phase_is_explained_by_its_largest_share_or_by_what_no_share_explains(
    shares: tuple[PhaseShare, ...], cause: str
) -> None:
    *_, decode = phases_of(10.0, SPLIT, 14.0, {(1, "decode"): shares})
    assert decode.cause == cause
    assert decode.shares == tuple(share for share in shares if share.duration_ms)


def test_another_dispatch_goes_through_the_phases_again_with_shares_of_its_own() -> None:
    again = (
        *SPLIT[:-1],
        Mark(Phase.QUEUED, 15.0, 2),
        Mark(Phase.GRANTED, 15.1, 2),
        Mark(Phase.PREFILLING, 15.2, 2, "prefill-1"),
        Mark(Phase.DECODING, 16.0, 2, "decode-1"),
    )
    shares: Shares = {(2, "decode"): (PhaseShare("paused", 900.0),)}
    phases = phases_of(10.0, again, 17.0, shares)
    assert [(phase.name, phase.dispatch) for phase in phases[-4:]] == [
        ("queue", 2),
        ("start", 2),
        ("prefill", 2),
        ("decode", 2),
    ]
    assert [phase.cause for phase in phases if phase.name == "decode"] == [
        "computing tokens",
        "paused for more urgent ones",
    ]


def test_one_that_ends_before_it_is_granted_has_waited_until_then() -> None:
    phases = phases_of(10.0, (Mark(Phase.RECEIVED, 10.5), Mark(Phase.REFUSED, 11.0)), 11.0, {})
    assert [(phase.name, phase.duration_ms) for phase in phases] == [("tokenize", 500.0), ("queue", 500.0)]


LIVES = st.lists(
    st.tuples(st.sampled_from(sorted(Phase, key=lambda phase: phase.value)), st.floats(0, 10), st.integers(1, 3)),
    max_size=40,
)


@given(LIVES)
def test_phases_follow_each_other_without_a_gap_and_add_up_to_the_whole(
    steps: list[tuple[Phase, float, int]],
) -> None:
    now_s, marks = 100.0, []
    for phase, after_s, dispatch in steps:
        now_s += after_s
        marks.append(Mark(phase, now_s, dispatch))
    phases = phases_of(100.0, marks, now_s + 1.0, {})
    for earlier, later in itertools.pairwise(phases):
        assert earlier.start_ms + earlier.duration_ms == pytest.approx(later.start_ms, abs=0.01)
    assert sum(phase.duration_ms for phase in phases) == pytest.approx((now_s + 1.0 - 100.0) * 1000, abs=0.1)

"""Will they fit until they end: the peak against growth step by step, and what the past tells of the future."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weir.bus.messages import Submit
from weir.scheduling.limits import PlacingLimits
from weir.scheduling.memory_fit import (
    NUM_PAST,
    Aggressive,
    Conservative,
    MemoryFit,
    OutputHistory,
    PastFuture,
    _Future,
)
from weir.scheduling.pools import ArenaLoad
from weir.scheduling.reservations import DecodeLoad
from weir.scheduling.running_lengths import RunningLengths

SEQUENCES = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 30)), min_size=1, max_size=12)


def grown_peak(held: list[int], left: list[int]) -> int:
    """Each sequence grows by a token a step and is gone when it has come to its end."""
    peak = 0
    for step in range(max(left) + 1):
        peak = max(peak, sum(h + step for h, to_come in zip(held, left, strict=True) if to_come >= step))
    return peak


def submit(prompt: int = 100, max_tokens: int = 400, predicted: float = 0.0) -> Submit:
    return Submit("new", "g", "m", "", "", prompt, max_tokens, 0, predicted_output_tokens=predicted)


def running(*sequences: tuple[int, int, int], now_s: float = 0.0) -> RunningLengths:
    """(prompt, max_tokens, emitted) each."""
    lengths = RunningLengths()
    for number, (prompt, max_tokens, emitted) in enumerate(sequences):
        lengths.add(f"r{number}", prompt, max_tokens, 0.0, now_s)
        if emitted:
            lengths.start(f"r{number}", 0.0, now_s)
            lengths.progressed(f"r{number}", emitted, now_s)
    return lengths


def arena_of(*lengths: RunningLengths, pages: int = 1000, reserved: int = 0) -> ArenaLoad:
    loads = tuple(DecodeLoad(lengths=each, num_pages=reserved) for each in lengths or [RunningLengths()])
    return ArenaLoad("a", pages, loads)


def fits(test: MemoryFit, arena: ArenaLoad, submit: Submit, now_s: float = 0.0) -> bool:
    """Where no share is guaranteed."""
    return test.fits(arena, arena.num_pages, submit, now_s)


def taught(test: PastFuture, *outputs: int) -> PastFuture:
    for index in range(NUM_PAST):
        test.finished("m", outputs[index % len(outputs)])
    return test


@settings(max_examples=300, deadline=None)
@given(SEQUENCES, st.integers(1, 50), st.lists(st.integers(0, 40), min_size=3, max_size=3))
def test_one_more_is_tested_as_if_all_were_laid_out_anew(
    sequences: list[tuple[int, int]], held_new: int, left_new: list[int]
) -> None:
    held = np.array([one[0] for one in sequences], float)
    left = np.array([[one[1] for one in sequences]] * 3, float)
    future = _Future(held, left, (0,), 0.0)
    all_held, all_left = ([*(one[part] for one in sequences)] for part in (0, 1))
    whole = max(grown_peak([*all_held, held_new], [*all_left, new]) for new in left_new)
    assert future.peak_with(float(held_new), np.array(left_new, float)) == whole


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=200),
    st.lists(st.tuples(st.integers(0, 59), st.integers(60, 90)), min_size=1, max_size=10),
    st.integers(0, 2**32),
)
def test_a_sequence_is_never_thought_to_end_before_what_it_has_nor_after_its_bound(
    past: list[int], sequences: list[tuple[int, int]], seed: int
) -> None:
    history = OutputHistory()
    for length in past:
        history.add(length)
    emitted = np.array([one[0] for one in sequences], float)
    bound = np.array([one[1] for one in sequences], float)
    total = history.sample_running(emitted, bound, np.random.default_rng(seed).random((5, len(sequences))))
    assert (total > emitted).all()
    assert (total <= bound).all()


def test_until_outputs_have_ended_the_worst_is_expected_and_then_what_was_seen() -> None:
    history = OutputHistory()
    assert history.expected(400) == 400
    for _ in range(NUM_PAST):
        history.add(40)
    assert history.expected(400) == 40
    assert history.expected(30) == 30


def test_the_conservative_test_reserves_the_worst_case() -> None:
    test = Conservative(overcommit=1.0)
    assert fits(test, arena_of(pages=100, reserved=68), submit(100, 400), 0.0)
    assert not fits(test, arena_of(pages=100, reserved=69), submit(100, 400), 0.0)
    assert fits(Conservative(2.0), arena_of(pages=100, reserved=168), submit(100, 400), 0.0)


def test_the_aggressive_test_looks_at_what_is_held_now() -> None:
    arena = arena_of(running((800, 400, 1), (700, 400, 1)), pages=104, reserved=150)
    assert fits(Aggressive(), arena, submit(100, 400), 0.0)
    assert not fits(Aggressive(), arena, submit(200, 400), 0.0)


def test_past_future_admits_what_the_worst_case_forbids_and_refuses_what_would_overflow() -> None:
    arena = arena_of(running(*[(100, 1000, 10)] * 10), pages=125, reserved=700)
    short = taught(PastFuture(PlacingLimits(memory_fit="past-future")), 30)
    long = taught(PastFuture(PlacingLimits(memory_fit="past-future")), 900)
    assert fits(short, arena, submit(100, 1000), 0.0)
    assert not fits(long, arena, submit(100, 1000), 0.0)
    assert not fits(PastFuture(PlacingLimits()), arena, submit(100, 1000), 0.0), "nothing is known yet"


def test_the_reserve_is_left_free() -> None:
    arena = arena_of(running(*[(100, 1000, 10)] * 10), pages=96)
    assert fits(taught(PastFuture(PlacingLimits(memory_reserve=0.0)), 30), arena, submit(), 0.0)
    assert not fits(taught(PastFuture(PlacingLimits(memory_reserve=0.1)), 30), arena, submit(), 0.0)


def test_an_empty_memory_takes_any_request() -> None:
    assert fits(PastFuture(PlacingLimits()), arena_of(RunningLengths(), pages=32), submit(100, 400), 0.0)


def test_a_refusal_holds_for_larger_requests_until_somebody_comes_or_goes_or_a_quarter_of_a_second_has_passed() -> None:
    lengths = running(*[(100, 1000, 10)] * 10)
    test = taught(PastFuture(PlacingLimits(memory_reserve=0.0)), 30)
    assert not fits(test, arena_of(lengths, pages=90), submit(100, 400), 0.0)
    lengths.start("r0", 0.0, 0.0)
    assert fits(test, arena_of(lengths, pages=100), submit(100, 400), 0.0), "another lane may have more"
    assert not fits(test, arena_of(lengths, pages=90), submit(100, 400), 0.0)
    lengths.remove("r0")
    assert fits(test, arena_of(lengths, pages=90), submit(100, 400), 0.0)


def test_a_prediction_that_is_trusted_is_the_length() -> None:
    arena = arena_of(running(*[(100, 1000, 10)] * 10), pages=125)
    limits = PlacingLimits(memory_fit="predicted", memory_reserve=0.0)
    test = taught(PastFuture(limits, trusts_predictions=True), 30)
    assert fits(test, arena, submit(100, 2000, predicted=30), 0.0)
    assert not fits(test, arena, submit(100, 2000, predicted=1900), 0.0)


def test_the_same_seed_draws_the_same() -> None:
    arena = arena_of(running(*[(100, 1000, 10)] * 8), pages=190)

    def answers(seed: int) -> list[bool]:
        test = taught(PastFuture(PlacingLimits(seed=seed)), 20, 300, 700, 40)
        return [fits(test, arena, submit(100), float(number)) for number in range(40)]

    assert answers(3) == answers(3)
    assert answers(3) != answers(4)


def test_tokens_are_taken_to_come_as_they_did_between_two_reports() -> None:
    lengths = RunningLengths()
    lengths.add("a", 100, 50, 0.0, 0.0)
    assert lengths.emitted(5.0).tolist() == [0.0]
    lengths.start("a", 10.0, 5.0)
    assert lengths.emitted(6.0).tolist() == [11.0]
    assert lengths.progressed("a", 21, 6.0) == 20
    assert lengths.emitted(6.5).tolist() == [31.0], "it came at 20 a second"
    assert lengths.emitted(60.0).tolist() == [49.0], "it has not ended"
    assert lengths.progressed("a", 5, 7.0) == 0, "a late report"


def test_columns_stay_with_their_sequences_as_others_leave() -> None:
    lengths = running(*[(100 + number, 1000, number + 1) for number in range(20)])
    assert lengths.prompt.tolist() == [100.0 + number for number in range(20)]
    for number in (0, 19, 7):
        lengths.remove(f"r{number}")
        lengths.remove(f"r{number}")
    left = sorted(set(range(20)) - {0, 19, 7})
    assert sorted(lengths.prompt.tolist()) == [100.0 + number for number in left]
    assert {(p, e) for p, e in zip(lengths.prompt, lengths.emitted(0.0), strict=True)} == {
        (100.0 + number, number + 1.0) for number in left
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_fit": "hope"}, "memory_fit 'hope': is none of conservative, aggressive, past-future, predicted"),
        ({"router": "north"}, "router 'north': is none of estimated-ttft, least-load, longest-prefix, random"),
        ({"memory_reserve": 1.0}, "memory_reserve 1.0: must be in"),
    ],
)
def test_a_bad_setting_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("[", "\\[")):
        PlacingLimits(**change)  # type: ignore[arg-type]

"""The tuner: what it tries, on whom, what it keeps and takes back, and how often it is wrong."""

import random
from dataclasses import replace

import pytest
from tests.unit.planner.tuning_world import BEST, IDS, SEQS, SETTINGS, TuningWorld

from weir.planner.tuning.evidence import SignedEvidence
from weir.planner.tuning.observation import TuningTick, WorkerTick, credit_of
from weir.planner.tuning.settings import Knob, TunerSettings
from weir.planner.tuning.steps import Cause, Deed
from weir.planner.tuning.trial import Trial
from weir.planner.tuning.tuner import Tuner


@pytest.mark.parametrize("spread", ["even", "few large", "changing"])
def test_what_is_no_better_is_taken_for_better_no_more_often_than_was_said(spread: str) -> None:
    """Looked at after each of 100 windows, in a thousand trials: 50 are expected at most, and 70 are 3 sigma more."""
    source, num_wrong = random.Random(1), 0
    for _ in range(1000):
        evidence = SignedEvidence(0.05)
        for window in range(100):
            size = {"even": source.random(), "few large": source.random() ** 8, "changing": 0.01 * (window % 9)}[spread]
            evidence.add(size * source.choice((-1, 1)))
            if evidence.verdict == "better":
                num_wrong += 1
                break
    assert num_wrong <= 70


@pytest.mark.parametrize("num_workers", [4, 8])
def test_workers_that_are_alike_and_stall_now_and_then_are_not_taken_for_better(num_workers: int) -> None:
    """In 400 trials of 12 windows, 15 % of which stall a worker: 20 are expected at most, and 34 are 3 sigma more."""
    source, settings = random.Random(2), replace(SETTINGS, settle_windows=1)
    ids = tuple(f"decode-{number}" for number in range(num_workers))
    causes = []
    for _ in range(400):
        trial = Trial(SEQS, 8, 4, ids[:1], ids[1:], settings, source)
        cause = None
        while cause is None:
            cause = trial.add(stalling(ids, source))
        causes.append(cause)
    assert sum(cause is Cause.BETTER for cause in causes) <= 34


def stalling(ids: tuple[str, ...], source: random.Random) -> TuningTick:
    """A whole window of workers that do the same, whatever their bound."""
    workers = []
    for number, one in enumerate(ids):
        num_tokens = (100 if source.random() < 0.15 else 1000) * source.uniform(0.98, 1.02)
        bound = 8 if number == 0 else 4
        workers.append(WorkerTick(one, "decode", num_tokens, 100, 4.0, 2, {"max_num_seqs": bound}))
    return TuningTick(1.0, SETTINGS.window_s, 0.0, tuple(workers))


def test_a_difference_that_all_windows_show_takes_few_of_them_in_either_direction() -> None:
    for sign, verdict in ((1, "better"), (-1, "worse")):
        evidence = SignedEvidence(0.05)
        while evidence.verdict == "open":
            evidence.add(sign * (0.10 + 0.01 * (evidence.num_windows % 3)))
        assert evidence.verdict == verdict
        assert 5 <= evidence.num_windows <= 8
    with pytest.raises(ValueError, match=r"difference 1\.5: must be in \[-1, 1\]"):
        evidence.add(1.5)


def test_a_token_counts_the_less_the_later_it_comes() -> None:
    assert credit_of(0.05, 0.08) == credit_of(0.95 * 0.08, 0.08) == 1.0
    assert 1.0 > credit_of(0.08, 0.08) > credit_of(0.1, 0.08) > credit_of(0.2, 0.08) > 0


@pytest.mark.parametrize("start", [2, 64])
@pytest.mark.parametrize("seed", range(5))
def test_from_a_bad_start_it_comes_near_the_best_there_is(start: int, seed: int) -> None:
    world = TuningWorld(start, seed=seed)
    world.run(150)
    found = {world.bounds[one] for one in IDS}
    assert len(found) == 1, "no trial goes on for ever"
    assert 0.7 * BEST <= found.pop() <= 1.1 * BEST


def test_it_moves_one_bound_of_one_worker_in_four_and_others_each_time() -> None:
    world = TuningWorld(2)
    world.run(150)
    tries = [step for step in world.steps if step.deed is Deed.TRY]
    assert [len(step.worker_ids) for step in tries] == [1] * len(tries)
    assert len({step.worker_ids for step in tries}) == 4
    ends = [step for step in world.steps if step.deed is not Deed.TRY]
    for first, then in zip(tries, ends, strict=False):
        assert (first.knob, first.value, first.was, first.worker_ids) == (
            then.knob,
            then.value,
            then.was,
            then.worker_ids,
        )
    assert [step.deed is Deed.TRY for step in world.steps][:6] == [True, False] * 3


def test_a_share_of_the_workers_may_be_canaries_and_one_is_always_left() -> None:
    for share, num in ((0.25, 1), (0.5, 2), (0.99, 3)):
        world = TuningWorld(2, Tuner(replace(SETTINGS, canary_share=share), random.Random(0)))
        assert len(world.run(2)[0].worker_ids) == num
    assert TuningWorld(2, ids=IDS[:1]).run(30) == [], "there is nothing to compare with"
    assert len(TuningWorld(2, ids=IDS[:2]).run(2)[0].worker_ids) == 1


def test_where_all_is_as_it_should_be_nothing_is_tried() -> None:
    assert TuningWorld(64, demand=10.0).run(60) == []


def test_a_bound_goes_down_from_what_runs_and_not_from_what_nothing_reaches() -> None:
    [step] = TuningWorld(64, demand=24.0).run(2)
    assert (step.value, step.was, step.cause) == (12, 64, Cause.MISSED)


def test_it_stays_within_what_an_operator_allows() -> None:
    world = TuningWorld(4, Tuner(replace(SETTINGS, knobs=(replace(SEQS, low=4, high=8),)), random.Random(0)))
    world.run(100)
    assert {value for _, value in world.deeds} <= set(range(4, 9))
    assert {world.bounds[one] for one in IDS} == {8}


def test_what_an_operator_has_set_by_hand_is_no_canary_and_no_measure() -> None:
    world = TuningWorld(2, fixed={IDS[1]: 6})
    world.run(100)
    assert world.bounds[IDS[1]] == 6
    assert max(world.bounds.values()) > 10
    assert all(IDS[1] not in (*step.worker_ids, *step.rest_ids) for step in world.steps)


def test_a_canary_that_does_much_harm_is_taken_back_at_once_and_left_alone() -> None:
    world = TuningWorld(BEST, slower=lambda _, value: 3.0 if value > BEST else 1.0)
    world.run(60)
    harmed = [step for step in world.steps if step.cause is Cause.HARM]
    assert harmed
    assert all(step.figures["windows"] <= 3 for step in harmed)
    tried = [value for deed, value in world.deeds if deed == "try"]
    assert len(tried) == len(set(tried)), "what was worse is not tried again"


def test_where_settings_are_equal_a_trial_ends_and_nothing_is_kept() -> None:
    def equal(_: str, value: int) -> float:
        """As many tokens a second with each value."""
        return (value / BEST) * (0.04 + 0.0025 * BEST) / (0.04 + 0.0025 * value)

    world = TuningWorld(BEST, Tuner(replace(SETTINGS, itl_slo_s=10.0), random.Random(0)), noise=0.0, slower=equal)
    steps = world.run(40)
    assert [(str(step.deed), step.cause) for step in steps[:2]] == [("try", Cause.WAITING), ("end", Cause.UNDECIDED)]
    assert Deed.KEEP not in {step.deed for step in steps}
    assert steps[1].figures["windows"] == SETTINGS.max_windows


def test_a_canary_that_goes_or_is_changed_by_others_ends_the_trial() -> None:
    world = TuningWorld(2)
    world.run(2)
    world.bounds[world.steps[0].worker_ids[0]] = 7
    [lost] = world.run(3)[:1]
    assert (lost.deed, lost.cause) == (Deed.END, Cause.LOST)
    world = TuningWorld(2)
    world.run(2)
    world.ids = [one for one in IDS if one not in world.steps[0].worker_ids]
    assert world.run(1)[0].cause is Cause.LOST


def test_one_of_the_rest_that_serves_no_more_ends_the_trial() -> None:
    world = TuningWorld(2)
    world.run(2)
    world.ids = [one for one in IDS if one != world.steps[0].rest_ids[0]]
    assert [step.cause for step in world.run(1)] == [Cause.LOST]


@pytest.mark.parametrize("is_fixed", [False, True])
def test_one_of_the_rest_that_others_change_ends_the_trial(is_fixed: bool) -> None:
    world = TuningWorld(2)
    world.run(2)
    if is_fixed:
        world.fixed = {world.steps[0].rest_ids[0]: 2}
    else:
        world.bounds[world.steps[0].rest_ids[0]] = 7
    assert [step.cause for step in world.run(1)] == [Cause.LOST]


def test_a_trial_that_others_have_ended_is_over_and_its_value_may_be_tried_again() -> None:
    world = TuningWorld(2)
    [first] = world.run(2)
    world.tuner.lost()
    world.bounds = dict.fromkeys(IDS, 2)
    assert world.tuner.trial is None
    again = world.run(3)[0]
    assert (again.deed, again.value) == (Deed.TRY, first.value)


def test_what_was_kept_and_is_worse_for_all_is_taken_back() -> None:
    world = TuningWorld(4)
    # A canary alone is fine; as soon as all have it, each is slow: they share something.
    world.slower = lambda _, value: 4.0 if value >= 8 and min(world.bounds.values()) >= 8 else 1.0
    world.run(40)
    relapse = next(step for step in world.steps if step.cause is Cause.RELAPSE)
    assert (relapse.deed, relapse.value, relapse.was) == (Deed.KEEP, 4, 8)
    assert relapse.figures["score_a_s"] < relapse.figures["score_before_a_s"]
    assert ("keep", 8) not in world.deeds[world.deeds.index(("keep", 4)) :]


def test_what_was_kept_stays_when_less_is_asked_for() -> None:
    world = TuningWorld(4)
    while not world.deeds or world.deeds[-1][0] != "keep":
        world.run(1)
    world.demand = 1.0
    assert world.run(20) == []


def test_what_is_only_advised_or_refused_is_no_trial() -> None:
    world = TuningWorld(2)
    steps = world.run(5, acts=False)
    assert [step.deed for step in steps] == [Deed.TRY] * 5
    assert {step.value for step in steps} == {4}
    world.tuner.refused(steps[-1])
    [other] = world.run(1, acts=False)
    assert other.value != 4


def test_a_window_with_hardly_any_token_says_nothing() -> None:
    world = TuningWorld(2, Tuner(replace(SETTINGS, min_tokens=10**6), random.Random(0)))
    steps = world.run(60)
    assert {step.cause for step in steps} == {Cause.WAITING, Cause.UNDECIDED}
    assert all(step.figures["windows"] == 0 for step in steps if step.deed is Deed.END)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"knobs": ()}, "knobs: none"),
        ({"knobs": (SEQS, SEQS)}, "a bound of a role comes twice"),
        ({"max_error": 0.0}, r"max_error 0\.0: must be over 0 and below 1"),
        ({"canary_share": 1.0}, r"canary_share 1\.0"),
        ({"window_s": 0.0}, r"window_s 0\.0: must be finite and over 0"),
        ({"max_windows": 0}, "max_windows 0: must be at least 1"),
        ({"min_tokens": -1}, "min_tokens -1: must be at least 0"),
    ],
)
def test_settings_that_cannot_be_are_named(values: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(SETTINGS, **values)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"decode\.max_num_seqs 8,4: must be from 1"):
        Knob("decode", "max_num_seqs", 8, 4)


def test_prefill_workers_are_judged_by_what_a_prompt_waits_for() -> None:
    settings = TunerSettings((SEQS,), ttft_slo_s=3.0, itl_slo_s=0.1)
    assert (settings.slo_s("prefill"), settings.slo_s("decode")) == (1.5, 0.1)
    assert WorkerTick("a", "decode", 0, 0, 0, 0, {}).step_s == 0


def test_a_step_says_its_reason_with_figures() -> None:
    world = TuningWorld(2)
    world.run(12)
    kept = next(step for step in world.steps if step.deed is Deed.KEEP)
    assert kept.reason.startswith("better: canary_score_a_s ")
    assert kept.as_dict()["bound"] == "decode.max_num_seqs"
    assert kept.figures["evidence"] >= kept.figures["evidence_needed"] == 20

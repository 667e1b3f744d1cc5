"""Probes predict from prompts that they have not seen, and choose without looking at them."""

import numpy as np
import numpy.typing as npt
import pytest

from benchmarks.predictors.hidden_states import AGES, LAYERS, StateTable
from benchmarks.predictors.measure import NUM_SIGNS
from benchmarks.predictors.probes import ProbeSettings, choose, fold_of, network_held_out, ridge_held_out
from benchmarks.predictors.state_probes import AnsweredPrompts, measure_ages, measure_start
from weir.policy.predictors.features import Floats
from weir.training.ranking import RankingSettings
from weir.training.samples import tau

QUICK = RankingSettings(num_members=2, least_steps=60, num_epochs=4)
SETTINGS = ProbeSettings(num_folds=3, num_inner_folds=2)
NUM, DIMS = 240, 12


def lengths_along(states: Floats, seed: int, noise: float = 0.3) -> npt.NDArray[np.int64]:
    """Longer the further along the first direction."""
    logs = 5 + 0.8 * states[:, 0] + noise * np.random.default_rng(seed).normal(size=len(states))
    return np.maximum(1, np.exp(logs)).astype(np.int64)


def random_rows(seed: int, num: int = NUM, dims: int = DIMS) -> Floats:
    return np.random.default_rng(seed).normal(size=(num, dims)).astype(np.float32)


def test_groups_are_held_out_whole_and_every_sample_once() -> None:
    groups = np.repeat(np.arange(50), 3)
    folds = fold_of(groups, 5, seed=1)
    assert set(folds.tolist()) == set(range(5))
    assert all(len(set(folds[groups == group].tolist())) == 1 for group in range(50))
    assert (folds != fold_of(groups, 5, seed=2)).any()


def test_ridge_finds_the_view_that_knows_and_ranks_by_it() -> None:
    telling, noise = random_rows(1), random_rows(2)
    lengths = lengths_along(telling, 3)
    found = ridge_held_out({"noise": (noise,), "telling": (telling,)}, lengths, np.arange(NUM), 0, SETTINGS)
    assert {name for name, _ in found.chosen} == {"telling"}
    assert tau(found.scores, lengths) > 0.6


def test_what_is_only_noise_ranks_nothing_whatever_is_chosen() -> None:
    """The choice of the best of many views would show here if it looked at what is held out."""
    views = {f"noise {number}": (random_rows(10 + number, dims=40),) for number in range(12)}
    lengths = np.random.default_rng(1).integers(1, 500, NUM)
    taus = [tau(ridge_held_out(views, lengths, np.arange(NUM), seed, SETTINGS).scores, lengths) for seed in range(4)]
    assert abs(float(np.mean(taus))) < 0.1


def test_the_choice_does_not_depend_on_what_is_held_out() -> None:
    views = {f"{number}": (random_rows(number),) for number in range(3)}
    lengths = lengths_along(views["1"][0], 3)
    kept, groups = np.arange(0, NUM, 2), np.arange(NUM)
    changed = lengths.copy()
    changed[1::2] = changed[1::2][::-1] * 7 + 3
    assert choose(views, lengths, groups, kept, 0, SETTINGS) == choose(views, changed, groups, kept, 0, SETTINGS)


def test_no_views_are_refused() -> None:
    with pytest.raises(ValueError, match="views: there is none"):
        ridge_held_out({}, np.ones(4, np.int64), np.arange(4), 0, SETTINGS)


def test_networks_see_the_features_that_are_picked_for_their_fold() -> None:
    telling = random_rows(1)
    lengths = lengths_along(telling, 3)
    asked: list[int] = []

    def pick(fold: int) -> Floats:
        asked.append(fold)
        return telling

    scores = network_held_out(pick, lengths, np.arange(NUM), 0, 3, QUICK)
    assert asked == [0, 1, 2]
    assert tau(scores, lengths) > 0.4


def test_a_start_is_measured_with_all_arms_and_states_that_know_win() -> None:
    states = np.stack([random_rows(20 + number) for number in range(len(LAYERS))], axis=1)
    lengths = lengths_along(states[:, 2], 5)
    features = random_rows(30, dims=NUM_SIGNS + 4)
    result = measure_start(
        AnsweredPrompts("made up", features, states, states[:, ::-1].copy(), lengths, lengths), [0], SETTINGS, QUICK
    )
    assert result.chosen == {f"last, layer {LAYERS[2]}": 3}
    assert result.taus["twice"].value == 1.0
    assert result.taus["last"].value > 0.6
    assert result.taus["last, network"].value > result.taus["today"].value + 0.2
    gain = result.gain("last", "today, ridge")
    assert gain.value - gain.half_width > 0.2


def test_along_the_way_the_latest_state_tells_what_is_left_and_the_prompt_does_not() -> None:
    """Answers of which only the latest state knows how much is left."""
    source = np.random.default_rng(6)
    lengths = source.integers(2, 400, NUM)
    states = source.normal(size=(NUM, len(AGES), len(LAYERS), DIMS)).astype(np.float32)
    for number, age in enumerate(AGES):
        states[:, number, 1, 0] = np.log(np.maximum(1, lengths - age))
        states[lengths <= age, number] = np.nan
    states[:, 0] = source.normal(size=states[:, 0].shape)
    table = StateTable(states, states[:, 0], np.arange(NUM), np.zeros(NUM, np.int64), lengths)
    results = {result.age: result for result in measure_ages(random_rows(7, dims=NUM_SIGNS + 3), table, [0], SETTINGS)}
    assert set(results) == {*AGES, None}
    for age in AGES[1:]:
        assert results[age].num_answers == int((lengths > age).sum())
        assert results[age].taus["now"].value > 0.8
        assert abs(results[age].taus["survived"].value) < 0.2
    assert results[None].taus["now"].value > results[None].taus["start"].value


def test_along_the_way_both_answers_to_a_prompt_are_held_out_together() -> None:
    """Features and states tell prompts apart, and lengths are a prompt's own: only who has seen the other answer could
    rank. In the queue of all ages the age itself tells something."""
    num_prompts, dims = 120, 150
    index = np.repeat(np.arange(num_prompts), 2)
    lengths = np.random.default_rng(1).integers(150, 500, num_prompts)[index]
    states = np.random.default_rng(2).normal(size=(num_prompts, len(AGES), len(LAYERS), dims)).astype(np.float32)[index]
    table = StateTable(states, states[:, 0], index, np.tile([0, 1], num_prompts), lengths)
    features = random_rows(3, num_prompts, NUM_SIGNS + dims)
    for result in measure_ages(features, table, [0], SETTINGS):
        if result.age is not None:
            assert {arm for arm, found in result.taus.items() if abs(found.value) > 0.2} == set()

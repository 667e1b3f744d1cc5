"""Magnus's regressors: lengths by a forest, serving times by neighbours."""

import numpy as np
import pytest
from sklearn.ensemble import RandomForestRegressor
from tests.unit.predictors.words import samples_of, word_table

from weir.policy.predictors.forest import Forest
from weir.training.forest import ForestSettings, LearningForest, RefitRule, fit_forest
from weir.training.samples import Samples
from weir.training.serving_time import NearestServingTime, NeighbourSettings
from weir.training.tau import tau

TABLE = word_table()
SMALL = ForestSettings(num_trees=12)


def test_the_arrays_predict_what_scikit_learn_does() -> None:
    samples = samples_of(TABLE, 150, noise=0.5)
    ours = fit_forest(samples, SMALL)
    theirs = RandomForestRegressor(12, min_samples_leaf=3, max_features=0.3, random_state=0)
    theirs.fit(samples.features, np.log1p(samples.num_output_tokens))
    shown = samples_of(TABLE, 80, noise=0.5, seed=9).features
    np.testing.assert_allclose(ours.predict(shown).output_tokens, np.expm1(theirs.predict(shown)), rtol=1e-4)


def test_a_forest_ranks_prompts_it_has_not_seen() -> None:
    forest = fit_forest(samples_of(TABLE, 300, noise=0.3), SMALL)
    shown = samples_of(TABLE, 150, noise=0.3, seed=9)
    predictions = forest.predict(shown.features)
    assert tau(predictions.output_tokens, shown.num_output_tokens) > 0.3
    assert tau(-predictions.scores, shown.num_output_tokens) > 0.3
    assert forest.score_of(10) > forest.score_of(100)


def test_only_bad_misses_are_kept_and_only_the_newest() -> None:
    base = samples_of(TABLE, 60, noise=0.3)
    learning = LearningForest(fit_forest(base, SMALL), base, RefitRule(max_misses=5), SMALL)
    row = base.features[0]
    assert not learning.observe(row, 100, 109), "9 tokens"
    assert not learning.observe(row, 1000, 1090), "8 %"
    assert learning.observe(row, 100, 150)
    for _ in range(20):
        learning.observe(row, 1, 500)
    assert learning.num_misses == 5


def test_a_forest_is_refitted_when_it_is_due_and_learns_from_its_misses() -> None:
    base = samples_of(TABLE, 100, noise=0.3)
    learning = LearningForest(fit_forest(base, SMALL), base, RefitRule(refit_s=180), SMALL)
    drifted = samples_of(TABLE, 200, noise=0.3, seed=5)
    longer = drifted.num_output_tokens * 20
    assert not learning.refit_if_due(1000.0), "nothing is new"
    before = learning.forest.predict(drifted.features).output_tokens.mean()
    for row, length in zip(drifted.features, longer, strict=True):
        learning.observe(row, 1.0, int(length))
    assert not learning.refit_if_due(1179.0), "too early"
    assert learning.refit_if_due(1180.0)
    assert learning.forest.predict(drifted.features).output_tokens.mean() > 4 * before
    assert not learning.refit_if_due(2000.0), "no new misses"


def test_trees_that_name_what_is_not_there_are_refused() -> None:
    one, two = np.array([0], np.int32), np.array([7], np.int32)
    numbers = np.zeros(1, np.float32)
    with pytest.raises(ValueError, match="a child or a feature that is not there"):
        Forest(one, numbers, two, two, numbers, one, num_features=3)


def test_a_loop_of_nodes_ends() -> None:
    zeros, numbers = np.array([0], np.int32), np.zeros(1, np.float32)
    forest = Forest(zeros, numbers, zeros, zeros, numbers, zeros, num_features=1)
    assert forest.predict(np.zeros((2, 1), np.float32)).output_tokens.tolist() == [1, 1]


def test_serving_times_are_learned_from_neighbours() -> None:
    now_s = [0.0]
    estimator = NearestServingTime(lambda: now_s[0], NeighbourSettings(least=20, refit_s=120))
    assert estimator.seconds(1000, 100) == pytest.approx(1.52), "the prior"
    source = np.random.default_rng(0)
    for _ in range(200):
        prompt, output = int(source.integers(10, 2000)), int(source.integers(1, 400))
        now_s[0] += 10
        estimator.observe(prompt, output, 0.1 + 0.001 * prompt + 0.05 * output)
    now_s[0] += 1000
    estimator.observe(10, 1, 9.0)
    for prompt, output in ((100, 50), (1500, 300)):
        assert estimator.seconds(prompt, output) == pytest.approx(0.1 + 0.001 * prompt + 0.05 * output, rel=0.35)


def test_serving_times_are_not_refitted_while_they_are_right() -> None:
    estimator = NearestServingTime(lambda: 0.0, NeighbourSettings(least=2, refit_s=0))
    for _ in range(3):
        estimator.observe(100, 100, 5.0)
    fitted = estimator._fitted
    estimator.observe(100, 100, 5.0)
    assert estimator._fitted is fitted
    estimator.observe(100, 100, 50.0)
    assert estimator._fitted is not fitted


def test_a_forest_needs_samples() -> None:
    few = samples_of(TABLE, 10, noise=0.3)
    with pytest.raises(ValueError, match="10 samples; a forest needs 20"):
        fit_forest(Samples(few.features, few.num_output_tokens))

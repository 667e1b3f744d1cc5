"""Magnus's length regressor: a forest, trained by scikit-learn and predicted with arrays."""

import numpy as np
import pytest
from sklearn.ensemble import RandomForestRegressor
from tests.unit.predictors.words import samples_of, word_table

from weir.policy.predictors.predictor import Forest
from weir.training.forest import ForestSettings, fit_forest
from weir.training.samples import Samples, tau

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


def test_trees_that_name_what_is_not_there_are_refused() -> None:
    one, two = np.array([0], np.int32), np.array([7], np.int32)
    numbers = np.zeros(1, np.float32)
    with pytest.raises(ValueError, match="a child or a feature that is not there"):
        Forest(one, numbers, two, two, numbers, one, num_features=3)


def test_a_loop_of_nodes_ends() -> None:
    zeros, numbers = np.array([0], np.int32), np.zeros(1, np.float32)
    forest = Forest(zeros, numbers, zeros, zeros, numbers, zeros, num_features=1)
    assert forest.predict(np.zeros((2, 1), np.float32)).output_tokens.tolist() == [1, 1]


def test_a_forest_needs_samples() -> None:
    few = samples_of(TABLE, 10, noise=0.3)
    with pytest.raises(ValueError, match="10 samples; a forest needs 20"):
        fit_forest(Samples(few.features, few.num_output_tokens))

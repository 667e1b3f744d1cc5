"""Magnus's length regressor: a random forest over a prompt's features (Cheng et al., arXiv 2406.04785)."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.ensemble import RandomForestRegressor

from weir.policy.predictors.features import Floats
from weir.policy.predictors.predictor import Forest
from weir.training.samples import Samples, tau

MIN_SAMPLES = 20


@dataclass(frozen=True, slots=True)
class ForestSettings:
    """`max_features`: share of the features that each split looks at."""

    num_trees: int = 100
    min_leaf: int = 3
    max_features: float = 0.3
    seed: int = 0


def fit_forest(samples: Samples, settings: ForestSettings | None = None) -> Forest:
    """On the logarithms of the lengths: a long answer's miss weighs as a short one's. Raises ValueError for fewer than
    MIN_SAMPLES samples."""
    settings = settings or ForestSettings()
    if len(samples) < MIN_SAMPLES:
        raise ValueError(f"{len(samples)} samples; a forest needs {MIN_SAMPLES} at least")
    regressor = RandomForestRegressor(
        settings.num_trees,
        min_samples_leaf=settings.min_leaf,
        max_features=settings.max_features,
        random_state=settings.seed,
        n_jobs=1,
    )
    regressor.fit(samples.features, np.log1p(samples.num_output_tokens))
    return _as_arrays(regressor, samples.features.shape[1])


def held_out_tau(samples: Samples, settings: ForestSettings | None = None, num_parts: int = 5) -> float:
    """Kendall's tau where each part is predicted by a forest that has not seen it.

    Raises ValueError as `fit_forest`.
    """
    settings = settings or ForestSettings()
    part_of = np.random.default_rng(settings.seed).permutation(len(samples)) % num_parts
    predicted = np.zeros(len(samples), np.float32)
    for part in range(num_parts):
        forest = fit_forest(samples.take(np.flatnonzero(part_of != part)), settings)
        left_out = np.flatnonzero(part_of == part)
        predicted[left_out] = forest.predict(samples.features[left_out]).output_tokens
    return tau(predicted, samples.num_output_tokens)


def _as_arrays(regressor: RandomForestRegressor, num_features: int) -> Forest:
    trees = [estimator.tree_ for estimator in regressor.estimators_]
    roots = np.cumsum([0] + [tree.node_count for tree in trees[:-1]]).astype(np.int32)

    def joined(name: str, shift: bool) -> list[npt.NDArray[Any]]:
        return [getattr(tree, name) + (root if shift else 0) for tree, root in zip(trees, roots, strict=True)]

    is_leaf = np.concatenate([tree.children_left < 0 for tree in trees])
    return Forest(
        feature=np.where(is_leaf, -1, np.concatenate(joined("feature", False))).astype(np.int32),
        threshold=_rounded_down(np.where(is_leaf, 0.0, np.concatenate(joined("threshold", False)))),
        left=np.where(is_leaf, -1, np.concatenate(joined("children_left", True))).astype(np.int32),
        right=np.where(is_leaf, -1, np.concatenate(joined("children_right", True))).astype(np.int32),
        value=np.concatenate([tree.value.reshape(-1) for tree in trees]).astype(np.float32),
        roots=roots,
        num_features=num_features,
    )


def _rounded_down(thresholds: npt.NDArray[np.float64]) -> Floats:
    """To float32, so that a float32 is at most the result exactly if it is at most the threshold."""
    rounded = thresholds.astype(np.float32)
    down: Floats = np.where(rounded > thresholds, np.nextafter(rounded, np.float32(-np.inf)), rounded)
    return down.astype(np.float32)

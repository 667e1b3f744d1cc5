"""Magnus's length regressor: a random forest over a prompt's features, refitted on what it got badly wrong.

Cheng et al., arXiv 2406.04785: random forest regression; requests that are off by more than 10 tokens and more than
10 % are kept, and every few minutes the forest is fitted again with them.
"""

import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.ensemble import RandomForestRegressor

from weir.policy.predictors.features import Floats
from weir.policy.predictors.forest import Forest
from weir.training.samples import Samples
from weir.training.tau import tau

MIN_SAMPLES = 20


@dataclass(frozen=True, slots=True)
class ForestSettings:
    """`max_features`: share of the features that each split looks at."""

    num_trees: int = 100
    min_leaf: int = 3
    max_features: float = 0.3
    seed: int = 0


@dataclass(frozen=True, slots=True)
class RefitRule:
    """When a forest is fitted again, and on how much."""

    bad_tokens: float = 10.0
    bad_share: float = 0.1
    refit_s: float = 180.0
    max_misses: int = 2048
    max_base: int = 4096


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


class LearningForest:
    """A forest that is refitted. `observe` from any thread; `refit_if_due` from one, seconds long."""

    def __init__(
        self, forest: Forest, base: Samples, rule: RefitRule | None = None, settings: ForestSettings | None = None
    ) -> None:
        """`base`: what it was fitted on first; a random share of at most `rule.max_base` stays part of every fit."""
        self._rule = rule or RefitRule()
        self._settings = settings or ForestSettings()
        kept = np.random.default_rng(self._settings.seed).permutation(len(base))[: self._rule.max_base]
        self._base = base.take(kept)
        self._lock = threading.Lock()
        self._misses: deque[tuple[Floats, int]] = deque(maxlen=self._rule.max_misses)
        self._num_new = 0
        self._fitted_at_s: float | None = None
        self.forest = forest

    @property
    def num_misses(self) -> int:
        return len(self._misses)

    def observe(self, features: Floats, predicted_tokens: float, num_output_tokens: int) -> bool:
        """A request ended by itself. True: the prediction was bad, so it is kept."""
        off = abs(predicted_tokens - num_output_tokens)
        if off <= self._rule.bad_tokens or off <= self._rule.bad_share * num_output_tokens:
            return False
        with self._lock:
            self._misses.append((np.array(features, np.float32), num_output_tokens))
            self._num_new += 1
        return True

    def refit_if_due(self, now_s: float) -> bool:
        """Fits anew if there are new misses and the last fit, or the first call, is long enough ago."""
        if self._fitted_at_s is None:
            self._fitted_at_s = now_s
        if now_s - self._fitted_at_s < self._rule.refit_s or not self._num_new:
            return False
        with self._lock:
            misses, self._num_new = list(self._misses), 0
        rows = np.stack([row for row, _ in misses])
        lengths = np.array([length for _, length in misses], np.int64)
        both = Samples(
            np.concatenate([self._base.features, rows]), np.concatenate([self._base.num_output_tokens, lengths])
        )
        self.forest = fit_forest(both, self._settings)
        self._fitted_at_s = now_s
        return True


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

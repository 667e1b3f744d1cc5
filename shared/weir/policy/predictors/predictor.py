"""Predictors of output length: features of a prompt, and a trained head that makes a score and a length of them.

Ranker  one hidden layer, and a map from its score to tokens. Trained with ListMLE after Fu et al., "Efficient LLM
        Scheduling by Learning to Rank", arXiv 2408.15792, who rank with a transformer; what pooled embeddings reach
        instead is measured by `benchmarks.predictors`. Several networks whose scores are averaged are one network with
        their hidden units side by side, so an ensemble costs one matrix product
Forest  the trees of a random forest as arrays, so that whoever only predicts needs no scikit-learn. The length
        regressor of Magnus: Cheng et al., "Enabling Efficient Batch Serving for LMaaS via Generation Length
        Prediction", arXiv 2406.04785
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from weir.policy.predictors.features import Floats, PromptFeatures

Arrays = Mapping[str, npt.NDArray[Any]]

_LARGEST_INPUT = 5.0
_RANKER_ARRAYS = ("means", "deviations", "w1", "b1", "w2", "score_knots", "token_knots")
_FOREST_ARRAYS = ("feature", "threshold", "left", "right", "value", "roots")
_MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class Predictions:
    """One entry a prompt. Scores of one predictor are comparable, higher is shorter; lengths are tokens, at least 1."""

    scores: Floats
    output_tokens: Floats


class Head(Protocol):
    """The trained part of a predictor: from features, [prompts, num_features], to predictions."""

    @property
    def kind(self) -> str: ...

    @property
    def num_features(self) -> int: ...

    def predict(self, features: Floats) -> Predictions: ...

    def score_of(self, num_output_tokens: float) -> float:
        """The score that an answer of this length would have got."""
        ...

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """For a file."""
        ...


@dataclass(frozen=True, slots=True)
class PredictorInfo:
    """Where a predictor comes from. `held_out_tau`: Kendall's tau of prompts that were not trained on."""

    model: str
    num_training: int
    held_out_tau: float


class Predictor:
    """Features and a head. Safe to use from several threads: nothing in it changes."""

    def __init__(self, features: PromptFeatures, head: Head, info: PredictorInfo) -> None:
        """Raises ValueError if they do not fit together."""
        if head.num_features != features.num_features:
            raise ValueError(f"the head takes {head.num_features} features, the table makes {features.num_features}")
        self.features = features
        self.head = head
        self.info = info

    def predict(self, prompts: Sequence[Sequence[int]]) -> Predictions:
        """Of the prompts' token ids, in one batch."""
        return self.head.predict(self.features.of(prompts))


@dataclass(frozen=True)
class Ranker:
    """All float32: means, deviations [features]; w1 [features, hidden], b1, w2 [hidden]; knots of the map from scores
    (rising) to tokens (falling)."""

    means: Floats
    deviations: Floats
    w1: Floats
    b1: Floats
    w2: Floats
    score_knots: Floats
    token_knots: Floats
    kind = "ranking"

    def __post_init__(self) -> None:
        inputs, hidden = self.w1.shape
        knots = self.score_knots.shape
        expected = {"means": (inputs,), "deviations": (inputs,), "b1": (hidden,), "w2": (hidden,), "token_knots": knots}
        for name in _RANKER_ARRAYS:
            array = getattr(self, name)
            if array.dtype != np.float32 or array.shape != expected.get(name, array.shape):
                raise ValueError(f"{name} is {array.dtype} {array.shape}, expected float32 {expected.get(name, '')}")
            if not np.isfinite(array).all():
                raise ValueError(f"{name} has numbers that are not finite")
        if len(knots) != 1 or knots[0] < 2 or (np.diff(self.score_knots) <= 0).any():
            raise ValueError(f"score_knots {self.score_knots.tolist()}: must be two or more, and rise")
        if (np.diff(self.token_knots) > 0).any() or self.token_knots[-1] < 1:
            raise ValueError(f"token_knots {self.token_knots.tolist()}: must not rise, and be at least 1")
        if (self.deviations <= 0).any():
            raise ValueError("deviations must be positive")

    @property
    def num_features(self) -> int:
        return int(self.w1.shape[0])

    def score(self, features: Floats) -> Floats:
        """Higher is shorter."""
        scaled = np.clip((features - self.means) / self.deviations, -_LARGEST_INPUT, _LARGEST_INPUT)
        scores: Floats = np.maximum(scaled @ self.w1 + self.b1, 0) @ self.w2
        return scores

    def predict(self, features: Floats) -> Predictions:
        scores = self.score(features)
        tokens = np.interp(scores, self.score_knots, self.token_knots).astype(np.float32)
        return Predictions(scores, tokens)

    def score_of(self, num_output_tokens: float) -> float:
        return float(np.interp(-num_output_tokens, -self.token_knots, self.score_knots))

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        return {name: getattr(self, name) for name in _RANKER_ARRAYS}

    @classmethod
    def from_arrays(cls, arrays: Arrays) -> "Ranker":
        return cls(*(arrays[name] for name in _RANKER_ARRAYS))


@dataclass(frozen=True)
class Forest:
    """Nodes of all trees behind each other. `feature` int32 [nodes], -1 at a leaf; `threshold`, `value` float32;
    `left` and `right` int32: where a feature is at most, and above the threshold; `roots` int32 [trees]."""

    feature: npt.NDArray[np.int32]
    threshold: Floats
    left: npt.NDArray[np.int32]
    right: npt.NDArray[np.int32]
    value: Floats
    roots: npt.NDArray[np.int32]
    num_features: int
    kind = "forest"

    def __post_init__(self) -> None:
        num_nodes = len(self.feature)
        for name in ("threshold", "left", "right", "value"):
            if getattr(self, name).shape != (num_nodes,):
                raise ValueError(f"{name} has shape {getattr(self, name).shape}, expected {(num_nodes,)}")
        if not len(self.roots) or not np.isfinite(self.value).all() or not np.isfinite(self.threshold).all():
            raise ValueError("a forest needs a tree, and finite numbers")
        inner = self.feature >= 0
        children = np.concatenate([self.left[inner], self.right[inner], self.roots])
        if (children < 0).any() or (children >= num_nodes).any() or (self.feature >= self.num_features).any():
            raise ValueError("a node names a child or a feature that is not there")

    def predict(self, features: Floats) -> Predictions:
        """The mean of the trees' logarithms of the length; the score is the negative of that."""
        at = np.broadcast_to(self.roots, (len(features), len(self.roots))).copy()
        rows = np.arange(len(features))[:, None]
        for _ in range(_MAX_DEPTH):
            feature = self.feature[at]
            inner = feature >= 0
            if not inner.any():
                break
            goes_left = features[rows, np.maximum(feature, 0)] <= self.threshold[at]
            at = np.where(inner, np.where(goes_left, self.left[at], self.right[at]), at)
        logs = self.value[at].mean(axis=1, dtype=np.float32)
        return Predictions(-logs, np.maximum(1, np.expm1(np.clip(logs, 0, 20))).astype(np.float32))

    def score_of(self, num_output_tokens: float) -> float:
        return -math.log1p(num_output_tokens)

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        sizes = {"num_features": np.array(self.num_features, np.int64)}
        return sizes | {name: getattr(self, name) for name in _FOREST_ARRAYS}

    @classmethod
    def from_arrays(cls, arrays: Arrays) -> "Forest":
        parts: dict[str, Any] = {name: arrays[name] for name in _FOREST_ARRAYS}
        return cls(**parts, num_features=int(arrays["num_features"]))


@dataclass(frozen=True, slots=True)
class CalibrationLimits:
    """`memory`: requests after which what was seen counts half; `prior`: requests that speak for a factor of 1."""

    memory: float = 256.0
    prior: float = 32.0
    smallest: float = 0.25
    largest: float = 4.0


class Calibration:
    """Keeps predicted lengths true while traffic drifts away from what a predictor was trained on.

    One factor for all, so that orders by score stay what they are: the sum of lengths over the sum of predictions, both
    fading, kept within the limits.
    """

    def __init__(self, limits: CalibrationLimits | None = None) -> None:
        self._limits = limits or CalibrationLimits()
        self._decay = 0.5 ** (1 / self._limits.memory)
        self._predicted = 0.0
        self._seen = 0.0
        self._weight = 0.0

    @property
    def factor(self) -> float:
        """By which the length of a predictor is multiplied."""
        if self._predicted <= 0:
            return 1.0
        prior = self._limits.prior * self._predicted / self._weight  # as so many requests of the mean length
        factor = (self._seen + prior) / (self._predicted + prior)
        return min(self._limits.largest, max(self._limits.smallest, factor))

    def observe(self, predicted_tokens: float, num_output_tokens: int, max_tokens: int) -> None:
        """A request ended by itself. `predicted_tokens` is the predictor's own, without the factor.

        One that was cut where the prediction was longer says nothing: both may be right.
        """
        is_cut = num_output_tokens >= max_tokens
        if predicted_tokens <= 0 or (is_cut and predicted_tokens >= max_tokens):
            return
        self._predicted = self._decay * self._predicted + predicted_tokens
        self._seen = self._decay * self._seen + num_output_tokens
        self._weight = self._decay * self._weight + 1.0

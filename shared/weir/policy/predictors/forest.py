"""A random forest's trees as arrays, so that whoever only predicts with it needs no scikit-learn.

The length regressor of Magnus: Cheng et al., "Enabling Efficient Batch Serving for LMaaS via Generation Length
Prediction", arXiv 2406.04785.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weir.policy.predictors.features import Floats
from weir.policy.predictors.predictor import Predictions

_MAX_DEPTH = 64


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
        return sizes | {name: getattr(self, name) for name in _NAMES}


_NAMES = ("feature", "threshold", "left", "right", "value", "roots")

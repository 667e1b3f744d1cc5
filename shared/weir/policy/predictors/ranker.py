"""A small ranking network: one hidden layer over a prompt's features, and a map from its score to tokens.

Trained with ListMLE after Fu et al., "Efficient LLM Scheduling by Learning to Rank", arXiv 2408.15792, who rank with a
transformer; what pooled embeddings reach instead is measured by `benchmarks.predictors`. Several networks whose scores
are averaged are one network with their hidden units side by side, so an ensemble costs one matrix product.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weir.policy.predictors.features import Floats
from weir.policy.predictors.predictor import Predictions

_LARGEST_INPUT = 5.0


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
        for name in _NAMES:
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
        return {name: getattr(self, name) for name in _NAMES}


_NAMES = ("means", "deviations", "w1", "b1", "w2", "score_knots", "token_knots")

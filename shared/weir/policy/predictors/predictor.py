"""What every predictor answers, and where it comes from."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from weir.policy.predictors.features import Floats, PromptFeatures


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


class PredictorFileError(Exception):
    """A file is not a predictor of this version, or is damaged; the message names the file and the reason."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}; make one with `weir train-predictor`")

"""Keeps predicted lengths true while traffic drifts away from what a predictor was trained on.

One factor for all: orders by score stay what they are, and the mean of what is predicted follows what is seen.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CalibrationLimits:
    """`memory`: requests after which what was seen counts half; `prior`: requests that speak for a factor of 1."""

    memory: float = 256.0
    prior: float = 32.0
    smallest: float = 0.25
    largest: float = 4.0


class Calibration:
    """The factor is the sum of lengths over the sum of predictions, both fading, kept within the limits."""

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

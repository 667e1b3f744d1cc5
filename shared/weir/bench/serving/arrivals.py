"""When requests come: Poisson, gamma or in bursts, at one rate or a rising one. Times follow from the seed."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True, slots=True)
class RampUp:
    """A rate that rises from the first request to the last, by equal steps or by equal factors."""

    strategy: Literal["linear", "exponential"]
    start_rps: float
    end_rps: float

    def __post_init__(self) -> None:
        if self.strategy not in ("linear", "exponential"):
            raise ValueError(f"ramp-up-strategy {self.strategy!r}: must be linear or exponential")
        if not 0 < self.start_rps <= self.end_rps < math.inf:
            rates = f"ramp-up-start-rps {self.start_rps:g}, ramp-up-end-rps {self.end_rps:g}"
            raise ValueError(f"{rates}: must be over 0, and the end finite and not below the start")

    def rate_at(self, progress: float) -> float:
        """`progress`: 0 the first request, 1 the last."""
        if self.strategy == "linear":
            return self.start_rps + (self.end_rps - self.start_rps) * progress
        return self.start_rps * math.pow(self.end_rps / self.start_rps, progress)


@dataclass(frozen=True, slots=True)
class ArrivalPlan:
    """`request_rate` a second, infinite: all at once.

    Gaps are gamma of shape `burstiness`: 1 is Poisson, less comes in bunches, infinity is a metronome. `burst_size`
    requests come at each moment, at the same rate of requests.
    """

    request_rate: float = math.inf
    burstiness: float = 1.0
    burst_size: int = 1
    ramp_up: RampUp | None = None

    def __post_init__(self) -> None:
        if not self.request_rate > 0:
            raise ValueError(f"request-rate {self.request_rate}: must be over 0, or inf")
        if not self.burstiness > 0:
            raise ValueError(f"burstiness {self.burstiness}: must be over 0")
        if self.burst_size < 1:
            raise ValueError(f"burst-size {self.burst_size}: must be at least 1")
        if self.ramp_up is not None and self.request_rate != math.inf:
            raise ValueError(f"request-rate {self.request_rate:g}: a ramp-up has rates of its own; leave it out")

    @property
    def is_open(self) -> bool:
        """Whether requests have times of their own, which do not wait for answers."""
        return self.request_rate != math.inf or self.ramp_up is not None

    def times_s(self, num: int, seed: int) -> list[float]:
        """The first at 0. A fixed rate is kept exactly, so that seeds differ in the pattern alone."""
        if not self.is_open:
            return [0.0] * num
        num_moments = -(-num // self.burst_size)
        gaps = self._unit_gaps(num_moments - 1, seed) * self.burst_size / self._rates(num_moments - 1)
        moments = np.concatenate([[0.0], np.cumsum(gaps)])
        if self.ramp_up is None and moments[-1] > 0:
            moments *= (num_moments - 1) * self.burst_size / self.request_rate / moments[-1]
        return [float(moments[index // self.burst_size]) for index in range(num)]

    def _unit_gaps(self, num: int, seed: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.float64]]":
        """Of mean 1."""
        if math.isinf(self.burstiness):
            return np.ones(num)
        return np.random.default_rng(seed).gamma(self.burstiness, 1.0 / self.burstiness, num)

    def _rates(self, num: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.float64]]":
        if self.ramp_up is None:
            return np.full(num, self.request_rate)
        return np.array([self.ramp_up.rate_at(index / max(1, num - 1)) for index in range(num)])

"""What the tuner is told: its goal, the bounds it may move and how far, and how sure it must be."""

import math
from dataclasses import dataclass
from typing import Literal

from weir.core.roles import WorkerRole

Bound = Literal["max_num_seqs", "max_num_batched_tokens"]
BOUNDS: tuple[Bound, Bound] = ("max_num_seqs", "max_num_batched_tokens")
_MAX_BOUND = 10**6


@dataclass(frozen=True, slots=True)
class Knob:
    """A bound of the workers of a role, and from where to where it may be moved. Raises ValueError."""

    role: WorkerRole
    bound: Bound
    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high <= _MAX_BOUND:
            problem = f"must be from 1 to {_MAX_BOUND}, the lower one first"
            raise ValueError(f"{self.role}.{self.bound} {self.low},{self.high}: {problem}")

    def clamped(self, value: float) -> int:
        """The nearest that it may have."""
        return min(self.high, max(self.low, round(value)))


@dataclass(frozen=True, slots=True)
class TunerSettings:
    """Times in seconds."""

    knobs: tuple[Knob, ...]
    """In the order in which they are looked at."""
    ttft_slo_s: float
    itl_slo_s: float
    target: float = 0.95
    """Share of the tokens that must come within the SLO."""
    window_s: float = 20.0
    """One comparison of the canaries with the rest."""
    canary_share: float = 0.25
    """Of the workers of a role, rounded down; one at least, and one is left."""
    max_error: float = 0.05
    """How often at most a setting that is no better is taken for better, however long one looks."""
    max_windows: int = 12
    """A trial that has shown nothing by then ends."""
    settle_windows: int = 1
    """After a change they are not counted, and up to five times as many while more runs than may."""
    check_windows: int = 3
    """After a setting was kept: whether it is as good for all."""
    min_tokens: int = 50
    """A window in which a side did less says nothing."""
    retry_windows: int = 180
    """For so many a setting that was no better is not tried again."""

    def __post_init__(self) -> None:
        if not self.knobs:
            raise ValueError("knobs: none; say from where to where a bound may be moved")
        names = [(knob.role, knob.bound) for knob in self.knobs]
        if len(set(names)) < len(names):
            raise ValueError("knobs: a bound of a role comes twice")
        for name in ("ttft_slo_s", "itl_slo_s", "window_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} {getattr(self, name)}: must be finite and over 0")
        for name in ("target", "canary_share", "max_error"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: must be over 0 and below 1")
        for name in ("max_windows", "settle_windows", "check_windows", "retry_windows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: must be at least 1")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens {self.min_tokens}: must be at least 0")

    def slo_s(self, role: WorkerRole) -> float:
        """What a step may take: a token's time, or half of what a first token has, for what waits needs the rest."""
        return self.itl_slo_s if role == "decode" else self.ttft_slo_s / 2

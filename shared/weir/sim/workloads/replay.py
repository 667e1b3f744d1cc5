"""A trace file as the load of a run: as it was, at another rate, or with arrivals of another kind."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from weir.sim.workloads.arrivals import burst, gamma, poisson
from weir.sim.workloads.compose import at_rate, first, with_arrivals
from weir.sim.workloads.traces import detect_format, read_trace
from weir.sim.workloads.workload import Workload

Arrivals = Literal["trace", "poisson", "gamma", "burst"]


@dataclass(frozen=True, slots=True)
class Replay:
    """`num_requests` 0: all. `rate_a_s` 0: the trace's own. `cv` is of gamma arrivals alone."""

    num_requests: int = 0
    rate_a_s: float = 0.0
    arrivals: Arrivals = "trace"
    cv: float = 1.0
    max_tokens: int = 0
    """What each asks for at most; 0: what the trace says, else its largest output."""

    def __post_init__(self) -> None:
        if self.num_requests < 0 or self.max_tokens < 0:
            raise ValueError(f"num_requests {self.num_requests}, max_tokens {self.max_tokens}: must be at least 0")
        if not 0 <= self.rate_a_s < float("inf"):
            raise ValueError(f"rate_a_s {self.rate_a_s}: must be finite and at least 0")
        if self.arrivals not in ("trace", "poisson", "gamma", "burst"):
            raise ValueError(f"arrivals {self.arrivals!r}: must be trace, poisson, gamma or burst")
        if self.arrivals in ("poisson", "gamma") and self.rate_a_s == 0:
            raise ValueError(f"rate_a_s 0: {self.arrivals} arrivals need a rate")

    @property
    def is_random(self) -> bool:
        """Whether a seed makes a difference to every trace."""
        return self.arrivals in ("poisson", "gamma")


def load_workload(path: Path, replay: Replay, seed: int = 0) -> Workload:
    """Raises TraceError if the file cannot be read, ValueError if it has no times of its own and none were asked for.

    With arrivals of another kind the requests stay in the order of the trace.
    """
    if replay.arrivals == "trace" and detect_format(path) == "lengths":
        raise ValueError(f"arrivals 'trace': {path} has lengths alone; name poisson or gamma and a rate, or burst")
    workload = read_trace(path, max_tokens=replay.max_tokens, seed=seed)
    if replay.num_requests:
        workload = first(workload, replay.num_requests)
    if replay.arrivals == "trace":
        return at_rate(workload, replay.rate_a_s) if replay.rate_a_s else workload
    num, source = len(workload.requests), np.random.default_rng(seed)
    if replay.arrivals == "burst":
        return with_arrivals(workload, burst(num))
    if replay.arrivals == "poisson":
        return with_arrivals(workload, poisson(replay.rate_a_s, num, source))
    return with_arrivals(workload, gamma(replay.rate_a_s, replay.cv, num, source))

"""What became of simulated requests: what their clients would have seen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestOutcome:
    """Times in seconds of simulated time. Filled in by the simulator as the request goes on."""

    request_id: str
    arrival_s: float
    lane: str
    tenant: str
    num_prompt_tokens: int
    num_output_tokens: int = 0
    """Delivered."""
    num_cached_tokens: int = 0
    granted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float | None = None
    worst_gap_s: float = 0.0
    """Between two tokens."""
    num_preemptions: int = 0
    is_local: bool = False
    prefill_worker_id: str = ""
    """Where it was prefilled, or was to be; empty: never granted."""
    refusal: str = ""
    """Not empty: refused, or given up, for this reason."""

    @property
    def is_finished(self) -> bool:
        return self.ended_s is not None and not self.refusal


@dataclass(frozen=True, slots=True)
class SimResult:
    """One run. `outcomes` in order of arrival; every request of the workload is there."""

    outcomes: Sequence[RequestOutcome]
    duration_s: float
    """Simulated, from the first arrival to the last end."""
    gap_counts_by_ms: Mapping[int, int] = field(default_factory=dict)
    """Histogram of all gaps between tokens: floor of milliseconds -> how many."""
    queue_lengths: Sequence[tuple[float, int]] = ()
    """(time, requests in the scheduler's queues), sampled."""
    tenant_service: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    """tenant -> (time, service so far in VTC units), sampled."""
    counters: Mapping[str, float] = field(default_factory=dict)

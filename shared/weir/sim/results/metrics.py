"""What became of requests, what a run of them came to, and how far that moves with the seed.

Every share and rate is over the *offered* requests: who was refused, given up or never finished is a miss, or dropping
the slow ones would look like speed. The first tenth of the requests by arrival is warm-up and counts nowhere (of a
burst all count); what ends after the last arrival counts. Times in seconds.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace

import numpy as np
from numpy.typing import NDArray

from weir.scheduling.limits import CoreLimits

WARMUP_SHARE = 0.1
# 97.5 % quantiles of Student's t with 1, 2, 3 … degrees of freedom; beyond the last one the next lower stands in, which
# is the wider interval.
_T_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


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
class WorkerSpan:
    """How long a worker was paid for: from its order to its end, in one role."""

    role: str
    from_s: float
    to_s: float
    """Infinite: it was there to the last."""


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
    worker_spans: Sequence[WorkerSpan] = ()
    """Where workers came and went."""

    @property
    def worker_s(self) -> float:
        """Summed over the workers, until the last arrival: what is paid for longer is the load's end, not a plan."""
        end_s = self.outcomes[-1].arrival_s if self.outcomes else 0.0
        return sum(max(0.0, min(span.to_s, end_s) - span.from_s) for span in self.worker_spans)


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request is asked to meet, all of it; infinite: not asked."""

    ttft_s: float = math.inf
    worst_gap_s: float = math.inf
    """Longest gap between two tokens: a mean hides a stall."""
    tpot_s: float = math.inf
    latency_s: float = math.inf

    def __post_init__(self) -> None:
        for entry in fields(self):
            if not getattr(self, entry.name) > 0:
                raise ValueError(f"{entry.name} {getattr(self, entry.name)}: must be over 0")

    def is_met_by(self, outcome: RequestOutcome) -> bool:
        return (
            outcome.is_finished
            and ttft_s(outcome) <= self.ttft_s
            and outcome.worst_gap_s <= self.worst_gap_s
            and tpot_s(outcome) <= self.tpot_s
            and latency_s(outcome) <= self.latency_s
        )


@dataclass(frozen=True, slots=True)
class Slos:
    """`by_lane` for the lanes that have their own, `default` for all others."""

    default: Slo = Slo()
    by_lane: Mapping[str, Slo] = field(default_factory=dict)

    def of(self, lane: str) -> Slo:
        return self.by_lane.get(lane, self.default)


def slos_of(limits: CoreLimits, default: Slo) -> Slos:
    """Each lane's own TTFT and ITL (as the bound on the worst gap) where it has them, else the default's."""
    by_lane = {}
    for lane in limits.lanes:
        slo = default
        if lane.ttft_slo_ms:
            slo = replace(slo, ttft_s=lane.ttft_slo_ms / 1e3)
        if lane.itl_slo_ms:
            slo = replace(slo, worst_gap_s=lane.itl_slo_ms / 1e3)
        if slo != default:
            by_lane[lane.name] = slo
    if limits.default_lane in by_lane:
        by_lane[""] = by_lane[limits.default_lane]
    return Slos(default, by_lane)


def slo_from_ms(ttft_ms: float, gap_ms: float, tpot_ms: float, latency_ms: float) -> Slo:
    """0: not asked."""
    return Slo(*(value / 1e3 if value else math.inf for value in (ttft_ms, gap_ms, tpot_ms, latency_ms)))


def ttft_s(outcome: RequestOutcome) -> float:
    """From arrival to first token; infinite without one."""
    return math.inf if outcome.first_token_s is None else outcome.first_token_s - outcome.arrival_s


def latency_s(outcome: RequestOutcome) -> float:
    """From arrival to last token; infinite without one."""
    return math.inf if outcome.last_token_s is None else outcome.last_token_s - outcome.arrival_s


def tpot_s(outcome: RequestOutcome) -> float:
    """Mean time of a token after the first; 0 where there is only one."""
    if outcome.first_token_s is None or outcome.last_token_s is None:
        return math.inf
    if outcome.num_output_tokens < 2:
        return 0.0
    return (outcome.last_token_s - outcome.first_token_s) / (outcome.num_output_tokens - 1)


def normalized_s(outcome: RequestOutcome) -> float:
    """Latency over output tokens (Orca, OSDI 2022): what size-based orders are measured by."""
    return latency_s(outcome) / max(1, outcome.num_output_tokens)


@dataclass(frozen=True, slots=True)
class Summary:
    """Latencies are of finished requests, NaN if there are none; shares and rates of all that were offered."""

    num_offered: int
    num_finished: int
    num_refused: int
    attainment: float
    """Share of the offered requests that met their SLO."""
    offered_a_s: float
    """Over the time of the counted arrivals."""
    goodput_a_s: float
    """Requests that met their SLO, over the time from the first counted arrival to the last end."""
    finished_a_s: float
    output_tokens_a_s: float
    mean_ttft_s: float
    p50_ttft_s: float
    p90_ttft_s: float
    p99_ttft_s: float
    max_ttft_s: float
    mean_wait_s: float
    """From arrival to grant."""
    mean_tpot_s: float
    p99_tpot_s: float
    p50_worst_gap_s: float
    p99_worst_gap_s: float
    mean_normalized_s: float
    p50_normalized_s: float
    p99_normalized_s: float
    mean_latency_s: float
    p99_latency_s: float
    preempted_share: float
    """Requests that were preempted at least once."""
    preemptions: float
    cached_share: float
    """Prompt tokens that were found in a cache."""
    local_share: float

    def as_dict(self) -> dict[str, float]:
        """Flat, for tables and JSON."""
        return asdict(self)


def summarize(
    result: SimResult,
    slos: Slos | None = None,
    *,
    warmup: float = WARMUP_SHARE,
    wanted: Callable[[RequestOutcome], bool] | None = None,
) -> Summary:
    """`wanted` picks from those after the warm-up, such as one lane's. Raises ValueError if nothing is left."""
    counted = [o for o in after_warmup(result.outcomes, warmup) if wanted is None or wanted(o)]
    if not counted:
        raise ValueError(f"none of {len(result.outcomes)} requests is counted: warm-up {warmup:g}, or nobody wanted")
    return _summary(counted, slos or Slos())


def after_warmup(outcomes: Sequence[RequestOutcome], warmup: float = WARMUP_SHARE) -> Sequence[RequestOutcome]:
    """All but the first `warmup` of them by arrival. What comes all at one moment has no warm-up: to leave out those
    that are served first would flatter whoever serves in another order."""
    if not 0 <= warmup < 1:
        raise ValueError(f"warmup {warmup}: must be at least 0 and below 1")
    if outcomes and outcomes[0].arrival_s == outcomes[-1].arrival_s:
        return outcomes
    return outcomes[int(len(outcomes) * warmup) :]


def by_lane(result: SimResult, slos: Slos | None = None, *, warmup: float = WARMUP_SHARE) -> dict[str, Summary]:
    """A summary of each lane's requests, by name."""
    return _grouped(after_warmup(result.outcomes, warmup), lambda outcome: outcome.lane, slos or Slos())


def by_tenant(result: SimResult, slos: Slos | None = None, *, warmup: float = WARMUP_SHARE) -> dict[str, Summary]:
    """A summary of each tenant's requests, by name."""
    return _grouped(after_warmup(result.outcomes, warmup), lambda outcome: outcome.tenant, slos or Slos())


def gap_percentile_s(result: SimResult, percentile: float) -> float:
    """Of all gaps between tokens, the upper end of its millisecond. Warm-up included. NaN without gaps."""
    if not 0 <= percentile <= 100:
        raise ValueError(f"percentile {percentile}: must be in [0, 100]")
    if not result.gap_counts_by_ms:
        return math.nan
    milliseconds = sorted(result.gap_counts_by_ms)
    counts = np.cumsum([result.gap_counts_by_ms[ms] for ms in milliseconds])
    rank = math.ceil(percentile / 100 * int(counts[-1]))
    return (milliseconds[int(np.searchsorted(counts, max(1, rank)))] + 1) / 1e3


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over `num` runs with its 95 % interval; of one run both ends are infinitely far away."""

    mean: float
    low: float
    high: float
    num: int


def mean_estimate(values: Sequence[float]) -> Estimate:
    """Student's t interval of the mean. Raises ValueError without values."""
    if not values:
        raise ValueError("an estimate needs at least one value")
    array = np.asarray(values, np.float64)
    mean = float(array.mean())
    if len(array) == 1 or not math.isfinite(mean):
        return Estimate(mean, -math.inf, math.inf, len(array))
    half = _t_quantile(len(array) - 1) * float(array.std(ddof=1)) / math.sqrt(len(array))
    return Estimate(mean, mean - half, mean + half, len(array))


def _grouped(
    outcomes: Iterable[RequestOutcome], key: Callable[[RequestOutcome], str], slos: Slos
) -> dict[str, Summary]:
    groups: dict[str, list[RequestOutcome]] = {}
    for outcome in outcomes:
        groups.setdefault(key(outcome), []).append(outcome)
    return {name: _summary(group, slos) for name, group in sorted(groups.items())}


def _summary(counted: Sequence[RequestOutcome], slos: Slos) -> Summary:
    finished = [outcome for outcome in counted if outcome.is_finished]
    num_met = sum(slos.of(outcome.lane).is_met_by(outcome) for outcome in counted)
    span_s = counted[-1].arrival_s - counted[0].arrival_s
    last_end_s = max((o.ended_s for o in counted if o.ended_s is not None), default=counted[-1].arrival_s)
    busy_s = last_end_s - counted[0].arrival_s
    ttft, tpot = _array(ttft_s, finished), _array(tpot_s, finished)
    gap = _array(lambda outcome: outcome.worst_gap_s, finished)
    normalized, latency = _array(normalized_s, finished), _array(latency_s, finished)
    num_prompt_tokens = sum(outcome.num_prompt_tokens for outcome in finished)
    return Summary(
        num_offered=len(counted),
        num_finished=len(finished),
        num_refused=sum(bool(outcome.refusal) for outcome in counted),
        attainment=num_met / len(counted),
        offered_a_s=_ratio(len(counted) - 1, span_s),
        goodput_a_s=_ratio(num_met, busy_s),
        finished_a_s=_ratio(len(finished), busy_s),
        output_tokens_a_s=_ratio(sum(outcome.num_output_tokens for outcome in counted), busy_s),
        mean_ttft_s=_mean(ttft),
        p50_ttft_s=_percentile(ttft, 50),
        p90_ttft_s=_percentile(ttft, 90),
        p99_ttft_s=_percentile(ttft, 99),
        max_ttft_s=_percentile(ttft, 100),
        mean_wait_s=_mean(_array(_wait_s, finished)),
        mean_tpot_s=_mean(tpot),
        p99_tpot_s=_percentile(tpot, 99),
        p50_worst_gap_s=_percentile(gap, 50),
        p99_worst_gap_s=_percentile(gap, 99),
        mean_normalized_s=_mean(normalized),
        p50_normalized_s=_percentile(normalized, 50),
        p99_normalized_s=_percentile(normalized, 99),
        mean_latency_s=_mean(latency),
        p99_latency_s=_percentile(latency, 99),
        preempted_share=sum(outcome.num_preemptions > 0 for outcome in counted) / len(counted),
        preemptions=sum(outcome.num_preemptions for outcome in counted),
        cached_share=_ratio(sum(outcome.num_cached_tokens for outcome in finished), num_prompt_tokens),
        local_share=_ratio(sum(outcome.is_local for outcome in finished), len(finished)),
    )


def _wait_s(outcome: RequestOutcome) -> float:
    return math.nan if outcome.granted_s is None else outcome.granted_s - outcome.arrival_s


def _array(measure: Callable[[RequestOutcome], float], outcomes: Sequence[RequestOutcome]) -> NDArray[np.float64]:
    return np.array([measure(outcome) for outcome in outcomes], np.float64)


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if len(values) else math.nan


def _percentile(values: NDArray[np.float64], percentile: float) -> float:
    return float(np.percentile(values, percentile)) if len(values) else math.nan


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _t_quantile(degrees: int) -> float:
    return _T_QUANTILES[min(degrees, len(_T_QUANTILES)) - 1]

"""What the tuner sees of each worker, and what it makes of it: a score that rises with the tokens that come in time."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from weir.core.roles import WorkerRole
from weir.planner.tuning.settings import Bound

_AIM = 0.96
"""Of the SLO: a mean at the SLO itself misses it every other time."""
_STEEPNESS = 12
"""Slower than the aim by a twentieth, a token counts half; one that misses by less is still seen to be better."""


@dataclass(frozen=True, slots=True)
class WorkerTick:
    """One worker since the last look. Tokens: of answers where it decodes, of prompts where it prefills."""

    worker_id: str
    role: WorkerRole
    num_tokens: float
    num_steps: float
    busy_s: float
    """Of its steps, together."""
    num_running: float
    """Sequences, at the moment."""
    bounds: Mapping[Bound, int]
    """That it runs under."""
    fixed: frozenset[Bound] = frozenset()
    """Those that an operator has set by hand."""

    @property
    def step_s(self) -> float:
        """The mean: the time between two tokens, where it decodes."""
        return self.busy_s / self.num_steps if self.num_steps else 0.0


@dataclass(frozen=True, slots=True)
class TuningTick:
    """All workers since the last look. `num_queued`: requests that wait for any."""

    at_s: float
    span_s: float
    num_queued: float
    workers: tuple[WorkerTick, ...]

    def __post_init__(self) -> None:
        if not self.span_s > 0:
            raise ValueError(f"span_s {self.span_s}: must be over 0")


@dataclass(frozen=True, slots=True)
class SideScore:
    """Of some workers over a window, each counted alike."""

    score_a_s: float
    """Tokens a second and worker, those that came late counted for less."""
    tokens_a_s: float
    met_share: float
    """Of the tokens: those of looks whose steps were within the SLO."""
    step_s: float
    """The mean of a token."""
    num_running: float
    """The most that any had at a look."""
    num_tokens: float


class TuningWindow:
    """Ticks that follow each other, under one setting each side."""

    def __init__(self) -> None:
        self._ticks: list[TuningTick] = []

    def add(self, tick: TuningTick) -> None:
        self._ticks.append(tick)

    @property
    def span_s(self) -> float:
        return sum(tick.span_s for tick in self._ticks)

    @property
    def waiting_share(self) -> float:
        """Of the looks: those at which a request waited."""
        return sum(tick.num_queued >= 1 for tick in self._ticks) / max(1, len(self._ticks))

    def side(self, worker_ids: Iterable[str], slo_s: float) -> SideScore:
        """Of these workers; one that came or went in the window counts for the looks that saw it."""
        wanted = set(worker_ids)
        seen = [(tick.span_s, worker) for tick in self._ticks for worker in tick.workers if worker.worker_id in wanted]
        worker_s = sum(span_s for span_s, _ in seen)
        num_tokens = sum(worker.num_tokens for _, worker in seen)
        if worker_s <= 0 or num_tokens <= 0:
            return SideScore(0.0, 0.0, 1.0, 0.0, max((worker.num_running for _, worker in seen), default=0.0), 0.0)
        credited = sum(worker.num_tokens * credit_of(worker.step_s, slo_s) for _, worker in seen)
        num_met = sum(worker.num_tokens for _, worker in seen if worker.step_s <= slo_s)
        return SideScore(
            score_a_s=credited / worker_s,
            tokens_a_s=num_tokens / worker_s,
            met_share=num_met / num_tokens,
            step_s=sum(worker.num_tokens * worker.step_s for _, worker in seen) / num_tokens,
            num_running=max(worker.num_running for _, worker in seen),
            num_tokens=num_tokens,
        )


def credit_of(step_s: float, slo_s: float) -> float:
    """What a token counts that took so long: 1 in time, and the less the later it came."""
    aim_s = _AIM * slo_s
    return 1.0 if step_s <= aim_s else float((aim_s / step_s) ** _STEEPNESS)


def relative_difference(one: float, other: float) -> float:
    """In [-1, 1]; 0 where neither has anything."""
    return (one - other) / (one + other) if one + other > 0 else 0.0

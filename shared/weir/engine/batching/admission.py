"""Who of those that wait joins the batch, and who of the batch is paused.

Without a gate whoever is next joins while the batch has room. A gate decides for itself; the bounds are the engine's:
at most `max_running` are computed in a step, and at most MAX_OVERBOOKING times as many are in the batch.

A full batch pauses a sequence for a more urgent one. It then waits as one that has not joined yet does, with its slot,
record and pages: what it has cost so far is not lost, unless pages run out (see `preemption`). Who is displaced: the
last of the batch, and only by one of a higher lane, or, where the policy is preemptive, of a better rank in the same
lane; by the latter not late in life (TRAIL's rule: Shahout et al., arXiv 2410.01035). Nobody is paused more than
`max_pauses` times, nor again after a pause of `max_pause_s`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from weir.engine.batching.followed_policy import FollowedPolicy
from weir.engine.sequence import Sequence, Stage

_NOBODY: frozenset[Sequence] = frozenset()
MAX_OVERBOOKING = 2
"""Times the sequences that a step may have: so many have slots and pages at most, the paused ones included."""


@dataclass(frozen=True, slots=True)
class PauseSettings:
    """`max_pauses` of one sequence; 0 turns pauses off. Within a lane nobody is paused for whom `max_age` of the output
    that was predicted for it has been sampled."""

    max_pauses: int = 3
    max_pause_s: float = 10.0
    max_age: float = 0.8

    def __post_init__(self) -> None:
        if self.max_pauses < 0 or self.max_pause_s < 0 or not 0 <= self.max_age <= 1:
            raise ValueError(f"{self}: max_pauses and max_pause_s must be at least 0, max_age in [0, 1]")


class Pausing:
    """The rule; the state is in the sequences."""

    def __init__(self, settings: PauseSettings) -> None:
        self._settings = settings
        self.goes_by_rank = False

    def order_of(self, sequence: Sequence) -> tuple[int, float]:
        """The smaller goes first; equals in the order in which they came."""
        params = sequence.params
        return -params.scheduling.lane_priority, params.scheduling.rank if self.goes_by_rank else 0.0

    def is_overdue(self, sequence: Sequence, now_s: float) -> bool:
        """It was paused for so long that it joins before anybody else does."""
        since_s = sequence.paused_since_s
        return since_s is not None and now_s >= since_s + self._settings.max_pause_s

    def try_choose(self, newcomer: Sequence, batch: Iterable[Sequence]) -> Sequence | None:
        """Who of `batch` (the last in order first) is to be paused for the newcomer."""
        urgency, lane = self.order_of(newcomer), newcomer.params.scheduling.lane_priority
        for sequence in batch:
            if self.order_of(sequence) <= urgency:
                return None
            is_below = sequence.params.scheduling.lane_priority < lane
            if sequence.num_pauses < self._settings.max_pauses and (is_below or not self._is_late(sequence)):
                return sequence
        return None

    def begin(self, sequence: Sequence, now_s: float) -> None:
        sequence.stage = Stage.WAITING
        sequence.num_pauses += 1
        sequence.paused_since_s = now_s

    def end(self, sequence: Sequence, now_s: float) -> None:
        """It has joined the batch, again or for the first time."""
        if self.is_overdue(sequence, now_s):
            sequence.num_pauses = self._settings.max_pauses
        sequence.paused_since_s = None

    def _is_late(self, sequence: Sequence) -> bool:
        predicted = sequence.params.scheduling.predicted_output_tokens
        return predicted > 0 and sequence.num_output_tokens >= self._settings.max_age * predicted


@dataclass(slots=True)
class BatchQueue:
    """`waiting` and `batch` in order. Of those that wait only the first `num_open` may join; the others come behind a
    preempted sequence of the batch, and nobody overtakes that."""

    waiting: list[Sequence]
    batch: list[Sequence]
    num_open: int

    @classmethod
    def of(cls, ranked: list[Sequence]) -> "BatchQueue":
        """`ranked`: all sequences of a batcher in order, but for those that are being handed over."""
        waiting: list[Sequence] = []
        batch: list[Sequence] = []
        num_open = None
        for sequence in ranked:
            if sequence.stage is not Stage.RUNNING:
                waiting.append(sequence)
                continue
            batch.append(sequence)
            if sequence.is_preempted and num_open is None:
                num_open = len(waiting)
        return cls(waiting, batch, len(waiting) if num_open is None else num_open)


class BatchAdmission:
    """`paused`: those of the batch that the gate pauses in this step."""

    def __init__(self, max_running: int, pausing: Pausing, policy: FollowedPolicy) -> None:
        self.max_running = max_running
        self._pausing = pausing
        self._policy = policy
        self.paused = _NOBODY

    def choose(self, queue: BatchQueue, now_s: float) -> list[Sequence]:
        """Who joins, in order, as far as there are pages."""
        if self._policy.gate is not None:
            return self._ask(queue, now_s)
        num_free = self.max_running - len(queue.batch)
        if num_free <= 0:
            return []
        overdue = [sequence for sequence in queue.waiting if self._pausing.is_overdue(sequence, now_s)]
        others = [sequence for sequence in queue.waiting[: queue.num_open] if sequence not in overdue]
        return [*overdue, *others][:num_free]

    def resume_all(self) -> None:
        """Those that a gate paused, when another policy is followed."""
        self.paused = _NOBODY

    def num_computed(self, batch: list[Sequence]) -> int:
        """Sequences that take part in the step."""
        return len(batch) - len(self.paused)

    def _ask(self, queue: BatchQueue, now_s: float) -> list[Sequence]:
        decision = self._policy.decide(queue.waiting, queue.batch, now_s)
        self.paused = frozenset(queue.batch[index] for index in decision.paused) if decision.paused else _NOBODY
        num_free = self.max_running - self.num_computed(queue.batch)
        num_free = min(num_free, MAX_OVERBOOKING * self.max_running - len(queue.batch))
        joining = [queue.waiting[index] for index in decision.joining if index < queue.num_open]
        return joining[: max(0, num_free)]

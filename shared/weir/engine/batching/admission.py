"""Who of those that wait joins the batch, and who of the batch is paused in a step.

Without a gate whoever is next joins while the batch has room. A gate decides for itself; the bounds are the engine's:
at most `max_running` are computed in a step, and at most MAX_OVERBOOKING times as many are in the batch.
"""

import logging
from dataclasses import dataclass

from weir.engine.batching.pausing import MAX_OVERBOOKING, Pausing
from weir.engine.batching.policy_views import PolicyViews
from weir.engine.counters import EngineCounters
from weir.engine.sequence import Sequence, Stage
from weir.policy.seams import BatchView, Gate, GateDecision

_log = logging.getLogger(__name__)
_NOBODY: frozenset[Sequence] = frozenset()


@dataclass(slots=True)
class BatchQueue:
    """`waiting` and `batch` in order. Of those that wait only the first `num_open` may join; the others come behind a
    preempted sequence of the batch, and nobody overtakes that."""

    waiting: list[Sequence]
    batch: list[Sequence]
    num_open: int

    @classmethod
    def of(cls, ranked: list[Sequence]) -> "BatchQueue":
        """`ranked`: all sequences of a batcher, in order."""
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

    def __init__(self, max_running: int, pausing: Pausing, views: PolicyViews, counters: EngineCounters) -> None:
        self._max_running = max_running
        self.paused: frozenset[Sequence] = _NOBODY
        self.gate: Gate | None = None
        self._pausing = pausing
        self._views = views
        self._counters = counters
        self._has_warned = False

    def choose(self, queue: BatchQueue, now_s: float) -> list[Sequence]:
        """Who joins, in order, as far as there are pages."""
        if self.gate is not None:
            return self._ask(self.gate, queue, now_s)
        num_free = self._max_running - len(queue.batch)
        if num_free <= 0:
            return []
        overdue = [sequence for sequence in queue.waiting if self._pausing.is_overdue(sequence, now_s)]
        others = [sequence for sequence in queue.waiting[: queue.num_open] if sequence not in overdue]
        return [*overdue, *others][:num_free]

    def num_computed(self, batch: list[Sequence]) -> int:
        """Sequences that take part in the step."""
        return len(batch) - len(self.paused)

    def set_gate(self, gate: Gate | None) -> None:
        self.gate = gate
        self.paused = _NOBODY

    def _ask(self, gate: Gate, queue: BatchQueue, now_s: float) -> list[Sequence]:
        view = self._views.batch(queue.waiting, queue.batch, self._max_running)
        decision = gate.decide(view, now_s)
        problem = _try_find_problem(decision, view)
        if problem is not None:
            self._count_defect(problem)
            decision = GateDecision(range(max(0, min(self._max_running - len(queue.batch), len(queue.waiting)))))
        self.paused = frozenset(queue.batch[index] for index in decision.paused) if decision.paused else _NOBODY
        num_free = self._max_running - self.num_computed(queue.batch)
        num_free = min(num_free, MAX_OVERBOOKING * self._max_running - len(queue.batch))
        joining = [queue.waiting[index] for index in decision.joining if index < queue.num_open]
        return joining[: max(0, num_free)]

    def _count_defect(self, problem: str) -> None:
        self._counters.policy_defects += 1
        if not self._has_warned:
            self._has_warned = True
            _log.error("the policy's gate is not followed in this step (logged once): %s", problem)


def _try_find_problem(decision: GateDecision, view: BatchView) -> str | None:
    for name, indices, bound in (
        ("joining", decision.joining, len(view.waiting)),
        ("paused", decision.paused, len(view.running)),
    ):
        if len(set(indices)) != len(indices) or not all(0 <= index < bound for index in indices):
            return f"{name} {list(indices)[:8]}: must be different indices below {bound}"
    return None

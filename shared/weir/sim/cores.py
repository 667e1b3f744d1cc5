"""The cores that the workers of a simulated host share: each step goes on the slower, the more others compute."""

from collections.abc import Callable
from dataclasses import dataclass

from weir.sim.timeline import Timeline


@dataclass(slots=True)
class _RunningStep:
    """`left_ns`: what it would still take by itself."""

    contention: float
    left_ns: float
    on_end: Callable[[], None]
    plan_number: int = 0

    def slowdown(self, num_running: int) -> float:
        return 1 + self.contention * (num_running - 1)


class SharedCores:
    """Steps of one host. One that takes `duration_ns` by itself goes on at 1 / (1 + contention * others) of its speed
    while `others` run beside it: processor sharing, as in queueing theory, with a slowdown that was measured."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._running: dict[str, _RunningStep] = {}
        self._looked_at_ns = 0

    def begin(self, worker_id: str, contention: float, duration_ns: int, on_end: Callable[[], None]) -> None:
        """`on_end` is called once, when the step has ended, unless it is dropped before."""
        self._go_on()
        self._running[worker_id] = _RunningStep(contention, duration_ns, on_end)
        self._plan_all()

    def drop(self, worker_id: str) -> None:
        """Its worker is dead. Nothing happens if it runs no step."""
        self._go_on()
        if self._running.pop(worker_id, None) is not None:
            self._plan_all()

    def _go_on(self) -> None:
        """Until now."""
        passed_ns = self._timeline.now_ns - self._looked_at_ns
        self._looked_at_ns = self._timeline.now_ns
        for step in self._running.values():
            step.left_ns -= passed_ns / step.slowdown(len(self._running))

    def _plan_all(self) -> None:
        """All ends anew: with one more or one less, each is another."""
        for worker_id, step in self._running.items():
            step.plan_number += 1
            left_ns = max(0, round(step.left_ns * step.slowdown(len(self._running))))
            self._timeline.after(left_ns, lambda w=worker_id, s=step, n=step.plan_number: self._end(w, s, n))  # type: ignore[misc]

    def _end(self, worker_id: str, step: _RunningStep, plan_number: int) -> None:
        if self._running.get(worker_id) is not step or step.plan_number != plan_number:
            return
        self._go_on()
        del self._running[worker_id]
        self._plan_all()
        step.on_end()

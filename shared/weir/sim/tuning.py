"""A simulated fleet whose workers' bounds are moved while they run, by whatever the real tuner's shell is told by."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from weir.core.roles import WorkerRole
from weir.engine.messages import SetBounds
from weir.planner.tuning.observation import TuningTick, WorkerTick
from weir.planner.tuning.settings import BOUNDS, Bound
from weir.planner.tuning.steps import Deed, TuningStep
from weir.sim.fleet import Fleet
from weir.sim.results.metrics import WorkerSpan
from weir.sim.scheduler import SimScheduler
from weir.sim.spec import SystemSpec
from weir.sim.timeline import NS_PER_S, Timeline, ns_of_s


class TuningController(Protocol):
    """Implemented by `weir.planner.tuning.tuner.Tuner`."""

    def look(self, tick: TuningTick) -> TuningStep | None:
        """Once a tick."""
        ...

    def begun(self, step: TuningStep) -> None: ...


@dataclass(frozen=True, slots=True)
class TuningSpec:
    """`make_controller`: anew for each run. `start`: what workers of a role run under at first, at most what the
    system's pools say, which is what they were started with; what is not named is that."""

    make_controller: Callable[[], TuningController]
    start: Mapping[tuple[WorkerRole, Bound], int] = field(default_factory=dict)
    tick_s: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.tick_s < float("inf"):
            raise ValueError(f"tick_s {self.tick_s}: must be finite and over 0")


@dataclass(slots=True)
class _Worker:
    """`most`: what it was started with. The rest: as the last look found it."""

    worker_id: str
    role: WorkerRole
    most: dict[Bound, int]
    bounds: dict[Bound, int]
    num_tokens: float = 0.0
    num_steps: float = 0.0
    busy_s: float = 0.0


class TunedFleet:
    """Local workers count as decode workers, as they do for the scheduler."""

    def __init__(
        self, tuning: TuningSpec, spec: SystemSpec, timeline: Timeline, fleet: Fleet, scheduler: SimScheduler
    ) -> None:
        self._tuning = tuning
        self._timeline = timeline
        self._fleet = fleet
        self._scheduler = scheduler
        self._controller = tuning.make_controller()
        self._workers = [self._worker(worker_id) for worker_id in spec.worker_ids]
        self._is_stopped = False

    def begin(self) -> None:
        """All workers are there."""
        for worker in self._workers:
            self._change(
                worker, {bound: value for (role, bound), value in self._tuning.start.items() if role == worker.role}
            )
        self._timeline.at(self._timeline.start_ns + ns_of_s(self._tuning.tick_s), self._tick)

    def stop(self) -> None:
        """Nothing is changed any more."""
        self._is_stopped = True

    def spans(self) -> Sequence[WorkerSpan]:
        """All are there all the time."""
        return tuple(WorkerSpan(one.role, 0.0, float("inf")) for one in self._workers)

    def _worker(self, worker_id: str) -> _Worker:
        pool = self._fleet.location(worker_id).pool
        most: dict[Bound, int] = {
            "max_num_seqs": pool.max_num_seqs,
            "max_num_batched_tokens": pool.max_num_batched_tokens,
        }
        return _Worker(worker_id, "prefill" if pool.role == "prefill" else "decode", most, dict(most))

    def _tick(self) -> None:
        if self._is_stopped:
            return
        at_s = self._timeline.since_start_s(self._timeline.now_ns)
        workers = tuple(map(self._seen, self._workers))
        step = self._controller.look(TuningTick(at_s, self._tuning.tick_s, self._scheduler.num_queued, workers))
        if step is not None:
            self._do(step)
            self._controller.begun(step)
        self._timeline.after(ns_of_s(self._tuning.tick_s), self._tick)

    def _seen(self, worker: _Worker) -> WorkerTick:
        engine = self._fleet.worker(worker.worker_id).engine
        counters = engine.counters()
        num_tokens = counters["tokens_generated" if worker.role == "decode" else "prompt_tokens_computed"]
        num_steps, busy_s = counters["steps"], engine.busy_ns / NS_PER_S
        tick = WorkerTick(
            worker_id=worker.worker_id,
            role=worker.role,
            num_tokens=num_tokens - worker.num_tokens,
            num_steps=num_steps - worker.num_steps,
            busy_s=busy_s - worker.busy_s,
            num_running=engine.num_running,
            bounds=dict(worker.bounds),
        )
        worker.num_tokens, worker.num_steps, worker.busy_s = num_tokens, num_steps, busy_s
        return tick

    def _do(self, step: TuningStep) -> None:
        bound = step.knob.bound
        for worker in self._workers:
            if step.deed is Deed.KEEP and worker.role == step.knob.role:
                self._change(worker, {bound: step.value})
            elif worker.worker_id in step.worker_ids:
                self._change(worker, {bound: step.value if step.deed is Deed.TRY else step.was})

    def _change(self, worker: _Worker, bounds: Mapping[Bound, int]) -> None:
        changed = {bound: min(bounds.get(bound, worker.bounds[bound]), worker.most[bound]) for bound in BOUNDS}
        if changed == worker.bounds:
            return
        worker.bounds = changed
        self._fleet.set_bounds(worker.worker_id, SetBounds(changed["max_num_seqs"], changed["max_num_batched_tokens"]))

"""Runs a workload on a simulated system, from the first arrival until every request has ended."""

from collections.abc import Callable

from weir.policy.registry import PolicySpec
from weir.scheduling.limits.core_limits import CoreLimits
from weir.sim.engines.make import EngineMaker
from weir.sim.memory.page_memory import MemoryIsTight
from weir.sim.request_state import check_workload
from weir.sim.results.outcome import SimResult
from weir.sim.spec import SystemSpec
from weir.sim.system.fleet import Fleet
from weir.sim.system.gateway import SimGateway
from weir.sim.system.scheduler import SimScheduler
from weir.sim.timeline import NS_PER_S, Timeline, ns_of_s
from weir.sim.workloads.workload import Workload

Progress = Callable[[int, float], None]
"""Requests ended, and simulated seconds; called about once a simulated second."""
DEFAULT_POLICY = PolicySpec("fcfs")
_SAMPLE_S = 1.0
_SETTLE_S = 60.0
"""After the last request has ended: messages, cancels and hand-offs that are under way still arrive."""


class SimulationDefect(Exception):
    """The simulated system lost a request, a page or a reservation: a defect of Weir, not of what was asked."""


def simulate(
    spec: SystemSpec,
    workload: Workload,
    *,
    limits: CoreLimits | None = None,
    policy: PolicySpec = DEFAULT_POLICY,
    fast_forward: bool = True,
    on_progress: Progress | None = None,
) -> SimResult:
    """The same arguments give the same result, byte for byte, with `fast_forward` or without. Where a decode worker's
    memory runs short in the course of a run with it, the run begins again with real batchers there, and so does its
    progress.

    Raises ValueError, SimulationDefect.
    """
    check_workload(workload)
    # Where one lane may displace another, the fast engines are not proven equal.
    fast_forward = fast_forward and len({request.lane for request in workload.requests}) <= 1

    def run(*, fast_decode: bool) -> SimResult:
        timeline = Timeline()
        engines = EngineMaker(spec, policy, timeline, fast_forward=fast_forward, fast_decode=fast_decode)
        return _Run(spec, workload, limits or CoreLimits(), engines, timeline, on_progress).result()

    try:
        return run(fast_decode=True)
    except MemoryIsTight:
        return run(fast_decode=False)


class _Run:
    """One simulation."""

    def __init__(
        self,
        spec: SystemSpec,
        workload: Workload,
        limits: CoreLimits,
        engines: EngineMaker,
        timeline: Timeline,
        on_progress: Progress | None,
    ) -> None:
        self._timeline = timeline
        self._on_progress = on_progress
        # The core places nothing while it gathers; arrivals begin after that.
        self._start_ns = ns_of_s(limits.gather_s + 1.0)
        self._num_requests = len(workload.requests)
        self._queue_lengths: list[tuple[float, int]] = []
        self._tenant_service: dict[str, list[tuple[float, float]]] = {}
        self._is_stopped = False
        profile = spec.pools[0].profile
        keeps_prefixes = spec.keeps_prefixes and any(request.prefix_blocks for request in workload.requests)
        self._fleet = Fleet(spec, timeline, engines, keeps_prefixes=keeps_prefixes)
        self._gateway = SimGateway(
            workload,
            profile,
            timeline,
            start_ns=self._start_ns,
            keeps_prefixes=keeps_prefixes,
            start=self._fleet.start,
            cancel=self._fleet.cancel,
        )
        self._scheduler = SimScheduler(
            limits,
            engines.policy.make(),
            profile,
            timeline,
            self._gateway.on_grant,
            self._gateway.on_revoke,
        )

    def result(self) -> SimResult:
        self._fleet.begin(self._gateway, self._scheduler, start_ns=self._start_ns)
        self._scheduler.start()
        self._gateway.begin(self._scheduler)
        self._timeline.at(self._start_ns, self._sample)
        while self._gateway.num_left:
            if not self._timeline.step():
                raise SimulationDefect(f"{self._gateway.num_left} requests never end")
        ended_ns = self._timeline.now_ns
        self._fleet.settle_all()
        self._gateway.report_progress()
        self._note_service()
        self._settle()
        self._check()
        self._fleet.note_preemptions()
        outcomes = tuple(self._gateway.outcomes)
        first_s = outcomes[0].arrival_s if outcomes else 0.0
        last_s = max((outcome.ended_s or 0.0 for outcome in outcomes), default=0.0)
        return SimResult(
            outcomes=outcomes,
            duration_s=last_s - first_s,
            gap_counts_by_ms=dict(sorted(self._gateway.gap_counts_by_ms.items())),
            queue_lengths=tuple(self._queue_lengths),
            tenant_service=self._tenant_service,
            counters=self._counters(ended_ns),
        )

    def _settle(self) -> None:
        """Until nothing is under way any more: messages, cancels, hand-offs."""
        self._is_stopped = True
        self._scheduler.stop()
        self._fleet.stop()
        ends_ns = self._timeline.now_ns + ns_of_s(_SETTLE_S)
        while (next_ns := self._timeline.next_ns) is not None and next_ns <= ends_ns:
            self._timeline.step()

    def _check(self) -> None:
        errors = [*self._scheduler.core.check_integrity(), *self._fleet.integrity_errors()]
        if not self._scheduler.core.is_idle:
            errors.append("the scheduler holds requests when all have ended")
        unended = sum(outcome.ended_s is None for outcome in self._gateway.outcomes)
        if unended or len(self._gateway.outcomes) != self._num_requests:
            errors.append(f"{len(self._gateway.outcomes)} of {self._num_requests} arrived, {unended} did not end")
        if errors:
            raise SimulationDefect("; ".join(errors[:5]))

    def _counters(self, ended_ns: int) -> dict[str, float]:
        core = {f"core_{name}": value for name, value in self._scheduler.core.metrics().items()}
        return {**self._fleet.counters(), **core, "simulated_s": (ended_ns - self._start_ns) / NS_PER_S}

    def _note_service(self) -> None:
        at_s = (self._timeline.now_ns - self._start_ns) / NS_PER_S
        for tenant, service in sorted(self._gateway.service.items()):
            self._tenant_service.setdefault(tenant, []).append((at_s, service))

    def _sample(self) -> None:
        if self._is_stopped:
            return
        self._fleet.settle_all()
        self._gateway.report_progress()
        self._note_service()
        at_s = (self._timeline.now_ns - self._start_ns) / NS_PER_S
        self._queue_lengths.append((at_s, self._scheduler.num_queued))
        if self._on_progress is not None:
            self._on_progress(self._num_requests - self._gateway.num_left, at_s)
        self._timeline.after(ns_of_s(_SAMPLE_S), self._sample)

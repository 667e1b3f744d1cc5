"""Runs a workload on a simulated system, from the first arrival until every request has ended."""

from collections.abc import Callable
from dataclasses import replace

from weir.policy.registry import PolicySpec
from weir.scheduling.limits import CoreLimits
from weir.sim.engines.make import EngineMaker
from weir.sim.fleet import Fleet
from weir.sim.gateway import SimGateway
from weir.sim.memory import MemoryIsTight
from weir.sim.request_state import PromptHashes
from weir.sim.results.metrics import SimResult
from weir.sim.scaling import ScaledFleet, ScalingSpec
from weir.sim.scheduler import SimScheduler
from weir.sim.spec import SystemSpec
from weir.sim.timeline import Timeline, ns_of_s
from weir.sim.tuning import TunedFleet, TuningSpec
from weir.sim.workloads.workload import Workload, check_workload

Progress = Callable[[int, float], None]
"""Requests ended, and simulated seconds; called about once a simulated second."""
DEFAULT_POLICY = PolicySpec("fcfs")
_SAMPLE_S = 1.0
_SETTLE_S = 60.0
"""After the last request has ended: messages, cancels and hand-offs that are under way still arrive."""
_LOST_AFTER_S = 10_800.0
"""No message, hand-off or step takes so long: what is neither queued nor computed in all this time will never end."""


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
    scaling: ScalingSpec | TuningSpec | None = None,
) -> SimResult:
    """`scaling`: workers come and go, the spec's being those at the start; or their bounds move, under the spec's.

    The same arguments give the same result, byte for byte, with `fast_forward` or without. Where the memory of
    a prefill or decode worker runs short in the course of a run with it, the run begins again with real batchers there,
    and so does its progress.

    Raises ValueError, SimulationDefect.
    """
    check_workload(workload)
    # Where one lane may displace another, the fast engines are not proven equal.
    fast_forward = fast_forward and len({request.lane for request in workload.requests}) <= 1
    fast_forward = fast_forward and not isinstance(scaling, TuningSpec)

    def run(*, is_roomy: bool) -> SimResult:
        # The core places nothing while it gathers; arrivals begin after that.
        core_limits = _with_link(limits or CoreLimits(), spec)
        timeline = Timeline(start_ns=ns_of_s(core_limits.gather_s + 1.0))
        shares = core_limits.step_shares
        engines = EngineMaker(spec, policy, timeline, fast_forward=fast_forward, is_roomy=is_roomy, step_shares=shares)
        return _Run(spec, workload, core_limits, engines, timeline, on_progress, scaling).result()

    try:
        return run(is_roomy=True)
    except MemoryIsTight:
        return run(is_roomy=False)


def _with_link(limits: CoreLimits, spec: SystemSpec) -> CoreLimits:
    """The scheduler takes links to be as they are: what it would have measured by and by."""
    if spec.host_link is None:
        return limits
    link_mbit_s, round_trip_ms = 8000 * spec.host_link.gbytes_per_s, 2 * spec.host_link.latency_ms
    placing = replace(limits.placing, link_mbit_s=link_mbit_s, link_round_trip_ms=round_trip_ms)
    return replace(limits, placing=placing)


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
        scaling: ScalingSpec | TuningSpec | None,
    ) -> None:
        self._timeline = timeline
        self._on_progress = on_progress
        self._num_requests = len(workload.requests)
        self._queue_lengths: list[tuple[float, int]] = []
        self._tenant_service: dict[str, list[tuple[float, float]]] = {}
        self._is_stopped = False
        self._progress: tuple[int, int] = (0, 0)
        self._progressed_at_s = 0.0
        profile = spec.pools[0].profile
        has_blocks = any(request.prefix_blocks for request in workload.requests)
        keeps_prefixes = spec.host_link is not None or (spec.keeps_prefixes and has_blocks)
        self._scheduler = SimScheduler(
            limits,
            engines.policy.make(),
            profile,
            timeline,
            lambda grant: self._gateway.on_grant(grant),  # noqa: PLW0108 - made below
            lambda revoke: self._gateway.on_revoke(revoke),  # noqa: PLW0108
            lambda migrate: self._fleet.migrate(migrate),  # noqa: PLW0108
        )
        self._gateway = SimGateway(
            workload,
            profile,
            timeline,
            self._scheduler,
            hashes=PromptHashes(workload.block_tokens, is_whole=spec.host_link is not None) if keeps_prefixes else None,
            start=lambda state: self._fleet.start(state),  # noqa: PLW0108
            cancel=lambda state: self._fleet.cancel(state),  # noqa: PLW0108
        )
        self._fleet = Fleet(spec, timeline, engines, self._gateway, self._scheduler, keeps_prefixes=keeps_prefixes)
        self._scaled: ScaledFleet | TunedFleet | None = None
        if isinstance(scaling, ScalingSpec):
            self._scaled = ScaledFleet(scaling, spec, timeline, self._fleet, self._gateway, self._scheduler)
        elif scaling is not None:
            self._scaled = TunedFleet(scaling, spec, timeline, self._fleet, self._scheduler)

    def result(self) -> SimResult:
        self._fleet.begin()
        self._scheduler.start()
        self._gateway.begin()
        if self._scaled is not None:
            self._scaled.begin()
        self._timeline.at(self._timeline.start_ns, self._sample)
        while self._gateway.num_left:
            self._timeline.step()
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
            worker_spans=() if self._scaled is None else self._scaled.spans(),
        )

    def _settle(self) -> None:
        """Until nothing is under way any more: messages, cancels, hand-offs."""
        self._is_stopped = True
        self._scheduler.stop()
        self._fleet.stop()
        if self._scaled is not None:
            self._scaled.stop()
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
        return {**self._fleet.counters(), **core, "simulated_s": self._timeline.since_start_s(ended_ns)}

    def _check_progress(self, at_s: float, num_queued: int) -> None:
        """Raises SimulationDefect for requests that are lost: what is done again and again goes on without them."""
        progress = (self._gateway.num_left, self._fleet.busy_ns)
        is_waiting = num_queued or len(self._gateway.outcomes) < self._num_requests
        if is_waiting or progress != self._progress:
            self._progress, self._progressed_at_s = progress, at_s
        elif at_s - self._progressed_at_s > _LOST_AFTER_S:
            raise SimulationDefect(f"{self._gateway.num_left} requests never end")

    def _note_service(self) -> None:
        at_s = self._timeline.since_start_s(self._timeline.now_ns)
        for tenant, service in sorted(self._gateway.service.items()):
            self._tenant_service.setdefault(tenant, []).append((at_s, service))

    def _sample(self) -> None:
        if self._is_stopped:
            return
        self._fleet.settle_all()
        self._gateway.report_progress()
        self._note_service()
        at_s, num_queued = self._timeline.since_start_s(self._timeline.now_ns), self._scheduler.num_queued
        self._queue_lengths.append((at_s, num_queued))
        self._check_progress(at_s, num_queued)
        if self._on_progress is not None:
            self._on_progress(self._num_requests - self._gateway.num_left, at_s)
        self._timeline.after(ns_of_s(_SAMPLE_S), self._sample)

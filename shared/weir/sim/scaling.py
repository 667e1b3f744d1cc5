"""A simulated fleet whose workers come and go: they start late, drain before they end, and change their roles.

start   ordered ── start_s ──> serves                       paid from the order on
spare   ordered ── spare_start_s ──> serves                 paid all the time, idle or not
end     drains ── until it is empty ──> gone                paid until it is gone; or a spare again
switch  drains ── until it is empty ── switch_s ──> serves in the other role
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from weir.core.roles import WORKER_ROLES, WorkerRole
from weir.planner.observation import MAX_LENGTHS, Observation, PoolCount, Pools, other_role
from weir.sim.fleet import Fleet
from weir.sim.gateway import SimGateway
from weir.sim.request_state import SimRequestState
from weir.sim.results.metrics import Slo, WorkerSpan, tpot_s, ttft_s
from weir.sim.scheduler import SimScheduler
from weir.sim.spec import SystemSpec
from weir.sim.timeline import Timeline, ns_of_s

_DRAINED_AFTER_S = 1.0
"""At least: what was granted before is on its way for less."""
_NO_SPARES = Pools(0, 0)


class FleetChange(NamedTuple):
    """Workers to order, or if negative to end, of each role; `switch_from`: one of this role is to change it."""

    prefill: int = 0
    decode: int = 0
    switch_from: WorkerRole | None = None


class Controller(Protocol):
    """Whatever decides how many workers there are."""

    def act(self, seen: Observation) -> FleetChange:
        """Once a tick."""
        ...


@dataclass(frozen=True, slots=True)
class ScalingSpec:
    """`make_controller`: anew for each run. Of a role never the last worker that serves is ended or switched."""

    make_controller: Callable[[], Controller]
    slo: Slo
    start_s: float
    switch_s: float = 3.0
    tick_s: float = 5.0
    spares: Pools = _NO_SPARES
    """Of each role, so many at most: warmed, and idle at the start. They are ordered before others."""
    spare_start_s: float = 0.2

    def __post_init__(self) -> None:
        if min(self.spares) < 0:
            raise ValueError(f"spares {tuple(self.spares)}: must be at least 0 of each role")
        for name in ("start_s", "switch_s", "tick_s", "spare_start_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} {getattr(self, name)}: must be finite and over 0")


@dataclass(slots=True, eq=False)
class _Member:
    """One worker from its order to its end."""

    worker_id: str
    role: WorkerRole
    from_s: float
    to_s: float = float("inf")
    is_serving: bool = False
    drains_from_s: float | None = None
    becomes: WorkerRole | None = None
    """Once it is empty."""


@dataclass(slots=True)
class _Seen:
    """Since the last look."""

    open: list[SimRequestState] = field(default_factory=list)
    unprefilled: list[SimRequestState] = field(default_factory=list)
    num_arrived: int = 0


class ScaledFleet:
    """Workers of a split system with a link, since only there each has memory of its own."""

    def __init__(
        self,
        scaling: ScalingSpec,
        spec: SystemSpec,
        timeline: Timeline,
        fleet: Fleet,
        gateway: SimGateway,
        scheduler: SimScheduler,
    ) -> None:
        """Raises ValueError."""
        if spec.link is None or {pool.role for pool in spec.pools} != set(WORKER_ROLES):
            raise ValueError("scaling: needs one prefill pool, one decode pool and a link between them")
        self._scaling = scaling
        self._timeline = timeline
        self._fleet = fleet
        self._gateway = gateway
        self._scheduler = scheduler
        self._controller = scaling.make_controller()
        self._templates: dict[WorkerRole, str] = {role: f"{role}-0" for role in WORKER_ROLES}
        self._num_made = {role: sum(one.startswith(role) for one in spec.worker_ids) for role in WORKER_ROLES}
        self._members = [
            _Member(worker_id, role, 0.0, is_serving=True)
            for role in WORKER_ROLES
            for worker_id in spec.worker_ids
            if worker_id.startswith(role)
        ]
        self._idle_since_s: dict[WorkerRole, list[float]] = {
            role: [0.0] * scaling.spares.of(role) for role in WORKER_ROLES
        }
        """Of each spare."""
        self._idle_spans: list[WorkerSpan] = []
        self._seen = _Seen()
        self._is_stopped = False

    def begin(self) -> None:
        """From the first arrival on."""
        self._timeline.at(self._timeline.start_ns + ns_of_s(self._scaling.tick_s), self._tick)

    def stop(self) -> None:
        """Nothing is decided any more."""
        self._is_stopped = True

    def spans(self) -> Sequence[WorkerSpan]:
        """Of all workers that there ever were, by their orders; then of spares while they were idle."""
        idle = [WorkerSpan(role, from_s, float("inf")) for role in WORKER_ROLES for from_s in self._idle_since_s[role]]
        return (*(WorkerSpan(one.role, one.from_s, one.to_s) for one in self._members), *self._idle_spans, *idle)

    @property
    def _now_s(self) -> float:
        return self._timeline.since_start_s(self._timeline.now_ns)

    def _tick(self) -> None:
        if self._is_stopped:
            return
        self._end_drained()
        change = self._controller.act(self._observe())
        if change.switch_from is not None:
            self._end(change.switch_from, becomes=other_role(change.switch_from))
        for role, num in (("prefill", change.prefill), ("decode", change.decode)):
            for _ in range(num):
                self._order(role)  # type: ignore[arg-type]
            for _ in range(-num):
                self._end(role)  # type: ignore[arg-type]
        self._timeline.after(ns_of_s(self._scaling.tick_s), self._tick)

    def _order(self, role: WorkerRole, after_s: float | None = None) -> None:
        worker_id = f"{role}-{self._num_made[role]}"
        self._num_made[role] += 1
        member = _Member(worker_id, role, self._now_s)
        self._members.append(member)
        if after_s is None and self._idle_since_s[role]:
            self._idle_spans.append(WorkerSpan(role, self._idle_since_s[role].pop(), self._now_s))
            after_s = self._scaling.spare_start_s
        self._timeline.after(ns_of_s(after_s or self._scaling.start_s), lambda: self._serve(member))

    def _serve(self, member: _Member) -> None:
        if self._is_stopped or member.to_s <= self._now_s:
            return
        member.is_serving = True
        template = self._fleet.location(self._templates[member.role])
        self._fleet.add(template.of_another(member.worker_id))

    def _end(self, role: WorkerRole, becomes: WorkerRole | None = None) -> None:
        """The newest that has not started, else the one with the least to do; never the last that serves."""
        starting = [one for one in self._present(role) if not one.is_serving]
        if starting and becomes is None:
            starting[-1].to_s = self._now_s
            return
        serving = [one for one in self._present(role) if one.is_serving and one.drains_from_s is None]
        if len(serving) < 2:
            return
        live = self._gateway.live_by_worker()
        member = min(serving, key=lambda one: live[one.worker_id])
        member.drains_from_s, member.becomes = self._now_s, becomes
        self._fleet.drain(member.worker_id)

    def _end_drained(self) -> None:
        live = self._gateway.live_by_worker()
        for member in list(self._members):
            began_s = member.drains_from_s
            if began_s is None or member.to_s <= self._now_s or self._now_s - began_s < _DRAINED_AFTER_S:
                continue
            if live[member.worker_id] == 0 and self._fleet.is_empty(member.worker_id):
                member.to_s = self._now_s
                self._fleet.retire(member.worker_id)
                idle = self._idle_since_s[member.role]
                if member.becomes is None and len(idle) < self._scaling.spares.of(member.role):
                    idle.append(self._now_s)
                if member.becomes is not None:
                    self._order(member.becomes, self._scaling.switch_s)

    def _present(self, role: WorkerRole) -> list[_Member]:
        now_s = self._now_s
        return [one for one in self._members if one.role == role and one.to_s > now_s]

    def _count(self, role: WorkerRole) -> PoolCount:
        """A worker that changes its role is starting in the new one as soon as that is decided."""
        present = self._present(role)
        serving = sum(one.is_serving and one.drains_from_s is None for one in present)
        draining = sum(one.drains_from_s is not None for one in present)
        coming = sum(one.becomes == role for one in self._present(other_role(role)))
        return PoolCount(serving, len(present) - serving - draining + coming, draining)

    def _observe(self) -> Observation:
        self._gateway.report_progress()
        seen, states = self._seen, self._gateway.states
        outcomes = self._gateway.outcomes
        arrived = [states[outcome.request_id] for outcome in outcomes[seen.num_arrived :]]
        seen.num_arrived = len(outcomes)
        seen.open += arrived
        seen.unprefilled += arrived
        first = [one for one in seen.unprefilled if one.outcome.first_token_s is not None]
        ended = [one for one in seen.open if one.is_over]
        seen.unprefilled = [one for one in seen.unprefilled if one.outcome.first_token_s is None and not one.is_over]
        seen.open = [one for one in seen.open if not one.is_over]
        slo = self._scaling.slo
        ttfts = [ttft_s(one.outcome) for one in first]
        tpots = [tpot_s(one.outcome) for one in ended if one.outcome.is_finished]
        num_prompt_tokens = sum(one.request.num_prompt_tokens for one in first)
        num_cached_tokens = sum(one.outcome.num_cached_tokens for one in first)
        return Observation(
            at_s=self._now_s,
            span_s=self._scaling.tick_s,
            num_arrived=len(arrived),
            prompt_lengths=tuple(one.request.num_prompt_tokens for one in arrived[:MAX_LENGTHS]),
            output_lengths=tuple(one.outcome.num_output_tokens for one in ended if one.outcome.is_finished)[
                :MAX_LENGTHS
            ],
            num_first_tokens=len(first),
            num_ttft_met=sum(value <= slo.ttft_s for value in ttfts),
            sum_ttft_s=sum(ttfts),
            num_ended=len(tpots),
            num_itl_met=sum(value <= slo.tpot_s for value in tpots),
            sum_itl_s=sum(tpots),
            cached_share=num_cached_tokens / num_prompt_tokens if num_prompt_tokens else 0.0,
            num_backlog_tokens=sum(one.request.num_prompt_tokens for one in seen.unprefilled),
            booked_share=self._booked_share(),
            prefill=self._count("prefill"),
            decode=self._count("decode"),
        )

    def _booked_share(self) -> float:
        """Of the decode workers that are there, those that drain with what is booked on them."""
        metrics = self._scheduler.core.metrics()
        present = [one for one in self._present("decode") if one.is_serving]
        pool = self._fleet.location(self._templates["decode"]).pool
        num = max(1, len(present))
        return max(
            metrics["reserved_pages"] / (num * pool.num_worker_pages), metrics["granted"] / (num * pool.max_num_seqs)
        )

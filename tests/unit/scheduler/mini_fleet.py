"""The core with one worker that does nothing but compute: one token a step for each sequence, prompts at once."""

from dataclasses import dataclass
from itertools import combinations

from tests.unit.scheduler.rig import make_worker

from weir.bus.messages import Finish, Outcome, Prefilled, Submit
from weir.core.clock import ManualClock
from weir.policy.registry import PolicySpec
from weir.scheduling.commands import SendGrant
from weir.scheduling.core import SchedulerCore
from weir.scheduling.limits import CoreLimits, LaneLimits, TenantLimits, TenantOrder

STEP_S = 0.05


@dataclass(frozen=True)
class Arrival:
    """At the beginning of a step."""

    step: int
    tenant: str
    num_prompt_tokens: int
    num_output_tokens: int


class MiniFleet:
    """`service` is what each tenant truly got, counted here, by price and weight."""

    def __init__(
        self,
        weights: dict[str, float],
        *,
        num_pages: int,
        max_num_seqs: int,
        tenant_order: TenantOrder = "fair",
        policy: str = "fcfs",
        max_tokens: int = 64,
    ) -> None:
        limits = CoreLimits(
            lanes=(LaneLimits("only", 10_000, 86_400.0),),
            default_lane="only",
            tenants=tuple(TenantLimits(name, weight) for name, weight in weights.items()),
            tenant_order=tenant_order,
            max_prefills=10**6,
            max_prefill_tokens=10**9,
            slot_overcommit=0.0,
            gather_s=0.0,
        )
        self.clock = ManualClock(100.0)
        self.core = SchedulerCore(limits, self.clock, 1, PolicySpec(policy).make())
        self.weights = weights
        self.service = dict.fromkeys(weights, 0.0)
        self.num_served = dict.fromkeys(weights, 0)
        """Requests that were started."""
        self.queued: dict[str, Arrival] = {}
        self._running: dict[str, list[int]] = {}
        """request -> [tokens sampled, tokens to sample]."""
        self._tenants: dict[str, str] = {}
        self._max_tokens = max_tokens
        self._num_pages, self._max_num_seqs = num_pages, max_num_seqs
        self._num_steps = 0
        self._see_workers()

    def submit(self, arrival: Arrival) -> None:
        request_id = f"r{len(self._tenants):05d}"
        self._tenants[request_id] = arrival.tenant
        submit = Submit(request_id, "g", "m", "only", arrival.tenant, arrival.num_prompt_tokens, self._max_tokens, 0)
        assert self.core.submit(submit).queued
        self.queued[request_id] = arrival

    def step(self) -> None:
        """Who can start starts; then each that runs samples a token."""
        self._take_grants()
        for request_id, sampled in list(self._running.items()):
            sampled[0] += 1
            self._serve(request_id, 2.0)
            self.core.progressed(request_id, sampled[0])
            if sampled[0] == sampled[1]:
                del self._running[request_id]
                self.core.finish(Finish(request_id, "g", 1, Outcome.FINISHED, sampled[0]))
        self._num_steps += 1
        self.clock.advance(STEP_S)
        if self._num_steps % 20 == 0:
            self._see_workers()

    @property
    def is_idle(self) -> bool:
        return not self.queued and not self._running

    def backlogged(self) -> set[str]:
        return {arrival.tenant for arrival in self.queued.values()}

    def gaps(self) -> dict[tuple[str, str], float]:
        """How much more service the first of two got than the second."""
        return {pair: self.service[pair[0]] - self.service[pair[1]] for pair in combinations(self.service, 2)}

    def _take_grants(self) -> None:
        for command in self.core.decide():
            if isinstance(command, SendGrant):
                request_id = command.grant.request_id
                arrival = self.queued.pop(request_id)
                self._running[request_id] = [0, arrival.num_output_tokens]
                self._serve(request_id, float(arrival.num_prompt_tokens))
                self.num_served[arrival.tenant] += 1
                self.core.prefilled(Prefilled(request_id, "g", 1))

    def _serve(self, request_id: str, service: float) -> None:
        tenant = self._tenants[request_id]
        self.service[tenant] += service / self.weights[tenant]

    def _see_workers(self) -> None:
        for worker_id in ("p", "d"):
            role = "prefill" if worker_id == "p" else "decode"
            record = make_worker(worker_id, role, pages=self._num_pages, seqs=self._max_num_seqs, context=10**6)
            self.core.worker_seen(record, 1 + self._num_steps)

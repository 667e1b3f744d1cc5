"""Loads, workers that obey or do not, and a model of them that is a formula."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from weir.core.roles import WORKER_ROLES, WorkerRole
from weir.planner.capacity import Prediction
from weir.planner.decision import Decision
from weir.planner.observation import ExpectedLoad, Observation, PoolCount, Pools, other_role
from weir.planner.planner import Planner
from weir.planner.settings import PlannerSettings

TOKENS_A_S = 1000.0
"""Of a prefill worker."""
ANSWERS_A_S = 2.0
"""Of a decode worker."""
PROMPT = 500
TWO_EACH = Pools(2, 2)
SETTINGS = PlannerSettings(ttft_slo_s=2.0, itl_slo_s=0.1, start_s=60.0, most=Pools(12, 12))


@dataclass(slots=True)
class FormulaCapacity:
    """Implements `weir.planner.capacity.CapacityModel`: all is well up to 90 % of what workers can do.

    `ttft_s`: that it tells of pools that are enough."""

    ttft_s: float = 0.5
    num_calls: int = 0

    def prefill_s(self, num_tokens: float) -> float:
        return num_tokens / TOKENS_A_S

    def predict(self, load: ExpectedLoad, pools: Pools) -> Prediction:
        self.num_calls += 1
        least = self.least_pools(load, 0.95, Pools(10**6, 10**6))
        if pools.prefill < least.prefill or pools.decode < least.decode:
            return Prediction(0.2, 100.0, 0.2)
        return Prediction(1.0, self.ttft_s, 0.05)

    def least_pools(self, load: ExpectedLoad, target: float, most: Pools) -> Pools:
        prefill = math.ceil(load.rate_a_s * load.mean_uncached_tokens / TOKENS_A_S / 0.9)
        decode = math.ceil(load.rate_a_s / ANSWERS_A_S / 0.9)
        return Pools(min(most.prefill, max(1, prefill)), min(most.decode, max(1, decode)))


def calm(at_s: float, pools: Pools = TWO_EACH, rate_a_s: float = 1.0) -> Observation:
    """A tick in which nothing is wrong."""
    num = round(rate_a_s * SETTINGS.tick_s)
    return Observation(
        at_s=at_s,
        span_s=SETTINGS.tick_s,
        num_arrived=num,
        prompt_lengths=(PROMPT,) * num,
        output_lengths=(50,) * num,
        num_first_tokens=num,
        num_ttft_met=num,
        sum_ttft_s=0.5 * num,
        num_ended=num,
        num_itl_met=num,
        sum_itl_s=0.05 * num,
        cached_share=0.0,
        num_backlog_tokens=0.0,
        booked_share=0.5,
        prefill=PoolCount(pools.prefill),
        decode=PoolCount(pools.decode),
    )


@dataclass(slots=True)
class World:
    """Workers that start late, drain, and switch, under a load; `obeys`: somebody does what is decided; `tells`: and
    says that it was begun, as an autoscaler does not."""

    planner: Planner
    rate_a_s: Callable[[float], float]
    pools: Pools = TWO_EACH
    obeys: bool = True
    tells: bool = True
    drain_s: float = 10.0
    decisions: list[Decision] = field(default_factory=list)
    seen: list[Observation] = field(default_factory=list)
    _serving: dict[WorkerRole, int] = field(default_factory=dict)
    _coming: list[tuple[float, WorkerRole]] = field(default_factory=list)
    _leaving: list[tuple[float, WorkerRole, WorkerRole | None]] = field(default_factory=list)
    _backlog_tokens: float = 0.0
    _num_running: float = 0.0

    def __post_init__(self) -> None:
        self._serving = {role: self.pools.of(role) for role in WORKER_ROLES}

    def run(self, until_s: float, *, from_s: float = 0.0) -> None:
        tick_s, at_s = SETTINGS.tick_s, from_s
        while at_s < until_s:
            at_s += tick_s
            self._move(at_s)
            seen = self._observe(at_s)
            self.seen.append(seen)
            decision = self.planner.decide(seen)
            if decision is None:
                continue
            self.decisions.append(decision)
            if self.obeys and decision.is_change:
                if self.tells:
                    self.planner.begun(decision)
                self._obey(decision)

    def _move(self, at_s: float) -> None:
        for due_s, role in [one for one in self._coming if one[0] <= at_s]:
            self._coming.remove((due_s, role))
            self._serving[role] += 1
        for leaving in [one for one in self._leaving if one[0] <= at_s]:
            self._leaving.remove(leaving)
            if leaving[2] is not None:
                self._coming.append((at_s + 3.0, leaving[2]))

    def _observe(self, at_s: float) -> Observation:
        rate, tick_s = self.rate_a_s(at_s), SETTINGS.tick_s
        capacity = self._serving["prefill"] * TOKENS_A_S * tick_s
        self._backlog_tokens = max(0.0, self._backlog_tokens + rate * tick_s * PROMPT - capacity)
        booked = min(1.0, rate / (ANSWERS_A_S * max(1, self._serving["decode"])))
        seen = calm(at_s, rate_a_s=rate)
        counts = {role: self._count(role) for role in WORKER_ROLES}
        ttft_s = 0.3 + self._backlog_tokens / TOKENS_A_S / max(1, self._serving["prefill"])
        return replace(
            seen,
            sum_ttft_s=ttft_s * seen.num_first_tokens,
            num_backlog_tokens=self._backlog_tokens,
            booked_share=booked,
            prefill=counts["prefill"],
            decode=counts["decode"],
        )

    def _count(self, role: WorkerRole) -> PoolCount:
        starting = sum(one[1] == role for one in self._coming) + sum(one[2] == role for one in self._leaving)
        return PoolCount(self._serving[role], starting, sum(one[1] == role for one in self._leaving))

    def _obey(self, decision: Decision) -> None:
        at_s = decision.at_s
        if decision.switch is not None:
            self._serving[decision.switch.from_role] -= 1
            self._leaving.append((at_s + self.drain_s, decision.switch.from_role, decision.switch.to_role))
            assert other_role(decision.switch.from_role) == decision.switch.to_role
        for role in WORKER_ROLES:
            num = decision.num_to_start(role)
            self._coming += [(at_s + SETTINGS.start_s, role)] * max(0, num)
            for _ in range(-num):
                self._serving[role] -= 1
                self._leaving.append((at_s + self.drain_s, role, None))
        assert min(self._serving.values()) >= 1, "the last of its role was taken"

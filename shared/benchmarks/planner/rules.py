"""Who decides how many workers there are: fixed numbers, two simple rules, a timetable, and the planner."""

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from weir.core.roles import WORKER_ROLES, WorkerRole
from weir.planner.capacity import CapacityModel
from weir.planner.decision import Decision
from weir.planner.observation import Observation, Pools
from weir.planner.planner import Planner
from weir.planner.settings import PlannerSettings
from weir.sim.scaling import FleetChange

_HPA_DOWN_WINDOW_S, _HPA_DOWN_EVERY_S, _HPA_UP_EVERY_S = 300.0, 300.0, 180.0
_HPA_BOOKED = 0.8
_STEP_EVERY_S = 30.0
_STEP_SENSITIVITY = 0.5
_STEP_BOOKED, _STEP_BOOKED_LOW = 0.9, 0.5


class Static:
    """Implements `weir.sim.scaling.Controller`: as many as there are."""

    def act(self, seen: Observation) -> FleetChange:
        del seen
        return FleetChange()


class HpaRule:
    """Implements `weir.sim.scaling.Controller`: llm-d's scaling of prefill workers by waiting tokens, and of decode
    workers by their share of use, as KEDA and the HPA apply them (guides/workload-autoscaling of llm-d).

    prefill = waiting tokens / (tokens/s * (TTFT SLO - time of a prompt));  decode = sum of shares of use / 0.8. One
    more every 180 s at once, one less every 300 s, by the largest wish of the last 300 s.
    """

    def __init__(self, settings: PlannerSettings, capacity: CapacityModel, pace: float) -> None:
        self._settings = settings
        self._capacity = capacity
        self._pace = pace
        self._wishes: dict[WorkerRole, deque[tuple[float, int]]] = {role: deque() for role in WORKER_ROLES}
        self._changed_at_s = dict.fromkeys(WORKER_ROLES, -math.inf)

    def act(self, seen: Observation) -> FleetChange:
        lengths = seen.prompt_lengths
        prompt_s = self._capacity.prefill_s(sum(lengths) / len(lengths)) if lengths else 0.0
        threshold_s = max(self._settings.ttft_slo_s - prompt_s, 0.1 * self._settings.ttft_slo_s)
        prefill = math.ceil(self._capacity.prefill_s(seen.num_backlog_tokens) / threshold_s)
        decode = math.ceil(seen.booked_share * max(1, seen.decode.serving + seen.decode.draining) / _HPA_BOOKED)
        return FleetChange(self._step("prefill", prefill, seen), self._step("decode", decode, seen))

    def _step(self, role: WorkerRole, wish: int, seen: Observation) -> int:
        most, least = self._settings.most.of(role), self._settings.least.of(role)
        wishes, at_s, current = self._wishes[role], seen.at_s, seen.count(role).num_to_be
        wishes.append((at_s, min(most, max(least, wish))))
        while wishes[0][0] < at_s - _HPA_DOWN_WINDOW_S * self._pace:
            wishes.popleft()
        passed_s = (at_s - self._changed_at_s[role]) / self._pace
        step = 0
        if wishes[-1][1] > current and passed_s >= _HPA_UP_EVERY_S:
            step = 1
        elif max(number for _, number in wishes) < current and passed_s >= _HPA_DOWN_EVERY_S:
            step = -1
        if step:
            self._changed_at_s[role] = at_s
        return step


class StepRule:
    """Implements `weir.sim.scaling.Controller`: one more when over the SLO, one less when well under it, nothing while
    something is pending (Dynamo's load loop, docs/design-docs/planner-design.md), every 30 s.

    Here requests wait for a decode worker's sequences before they are prefilled, so decode workers are over when nearly
    all of their sequences are booked, not by the time of a token alone."""

    def __init__(self, settings: PlannerSettings, capacity: CapacityModel, pace: float) -> None:
        self._settings = settings
        self._capacity = capacity
        self._every_s = _STEP_EVERY_S * pace
        self._acted_at_s = -math.inf

    def act(self, seen: Observation) -> FleetChange:
        if seen.at_s - self._acted_at_s < self._every_s:
            return FleetChange()
        self._acted_at_s = seen.at_s
        return FleetChange(self._prefill(seen), self._decode(seen))

    def _prefill(self, seen: Observation) -> int:
        lengths = seen.prompt_lengths
        prompt_s = self._capacity.prefill_s(sum(lengths) / len(lengths)) if lengths else 0.0
        ttft_s = prompt_s + self._capacity.prefill_s(seen.num_backlog_tokens) / max(1, seen.prefill.serving)
        is_over = ttft_s > self._settings.ttft_slo_s and seen.booked_share <= _STEP_BOOKED
        is_under = ttft_s < _STEP_SENSITIVITY * self._settings.ttft_slo_s
        return self._bounded("prefill", is_over - (is_under and not is_over), seen)

    def _decode(self, seen: Observation) -> int:
        is_over = seen.booked_share > _STEP_BOOKED or seen.num_itl_met < self._settings.target * seen.num_ended
        is_under = seen.booked_share < _STEP_BOOKED_LOW
        return self._bounded("decode", is_over - (is_under and not is_over), seen)

    def _bounded(self, role: WorkerRole, step: int, seen: Observation) -> int:
        count = seen.count(role)
        if count.is_changing:
            return 0
        wanted = min(max(count.num_to_be + step, self._settings.least.of(role)), self._settings.most.of(role))
        return wanted - count.num_to_be


class Slot(NamedTuple):
    """From `from_s` on so many workers are to serve."""

    from_s: float
    pools: Pools


class Timetable:
    """Implements `weir.sim.scaling.Controller`: orders workers so that they serve in time, for who knows the future."""

    def __init__(self, slots: Sequence[Slot], start_s: float, tick_s: float) -> None:
        """The first slot is what there is at the start."""
        self._slots = slots
        self._ahead_s = start_s + 2 * tick_s

    def act(self, seen: Observation) -> FleetChange:
        now = [slot.pools for slot in self._slots if slot.from_s <= seen.at_s][-1]
        soon = [slot.pools for slot in self._slots if seen.at_s < slot.from_s <= seen.at_s + self._ahead_s]
        wanted = Pools(*(max(pools.of(role) for pools in (now, *soon)) for role in WORKER_ROLES))
        return FleetChange(wanted.prefill - seen.pools.prefill, wanted.decode - seen.pools.decode)


class PlannerRule:
    """Implements `weir.sim.scaling.Controller`: does what the planner decides."""

    def __init__(self, settings: PlannerSettings, capacity: CapacityModel) -> None:
        self._planner = Planner(settings, capacity)
        self.decisions: list[Decision] = []

    def act(self, seen: Observation) -> FleetChange:
        decision = self._planner.decide(seen)
        if decision is None:
            return FleetChange()
        if not decision.is_change:
            return FleetChange()
        self.decisions.append(decision)
        self._planner.begun(decision)
        switch_from = None if decision.switch is None else decision.switch.from_role
        return FleetChange(decision.num_to_start("prefill"), decision.num_to_start("decode"), switch_from)

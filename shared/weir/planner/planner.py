"""The planner: one decision a tick, by the slow loop's floor, the fast loop's pressure, and rules that keep it calm.

    observation ─> window ─> outlook (floor, spare, is the model right) ─┐
               └─> pressure (backlog, booked, ITL) ──────────────────────┴─> wishes ─> rules ─> decision

It judges by what is seen alone. Whoever acts on a decision says so (`begun`), and what is begun is pending until it is
seen, or until it should have been; where nobody acts, nothing is waited for.
"""

import math
from dataclasses import replace

from weir.core.roles import WORKER_ROLES, WorkerRole
from weir.planner.capacity import CapacityModel
from weir.planner.decision import Decision, PoolDecision, Reason, Switch
from weir.planner.history import KeptOrders, Reversals
from weir.planner.observation import Observation, PoolCount, Window, other_role
from weir.planner.outlook import Outlook
from weir.planner.pressure import Pressure
from weir.planner.settings import PlannerSettings

_DWELL_SWITCHES = 10.0
_UNSEEN_AFTER = 2.0
"""Times the start time: what was begun and has not been seen by then is not coming."""


class Planner:
    """Of one model's prefill and decode pools."""

    def __init__(self, settings: PlannerSettings, capacity: CapacityModel) -> None:
        self._settings = settings
        self._window = Window(settings.window_s)
        self._outlook = Outlook(settings, capacity)
        self._pressure = Pressure(settings, capacity)
        self._orders = {role: KeptOrders(settings.start_s) for role in WORKER_ROLES} if settings.keeps_orders else {}
        self._reversals = {role: Reversals(settings) for role in WORKER_ROLES}
        self._begun: dict[WorkerRole, tuple[float, int]] = {}
        """When, and how many workers of the pool there were to be then, seen since it was begun."""
        self._switch_s = settings.switch_s
        self._switched_at_s = -math.inf
        self._num_decisions = 0

    def decide(self, seen: Observation) -> Decision | None:
        """None: a window has not been seen yet. `seen` in the order of time."""
        self._window.add(seen)
        self._pressure.add(seen)
        self._note_done(seen)
        if not self._window.is_full:
            return None
        self._outlook.look(self._window, seen)
        wishes = {role: self._wish(role, seen) for role in WORKER_ROLES}
        for role, orders in self._orders.items():
            wishes[role] = orders.kept(seen.at_s, wishes[role])
        switch = self._try_switch(wishes, seen)
        for role in WORKER_ROLES:
            self._reversals[role].note(seen.at_s, wishes[role].delta)
        return self._decision(seen, wishes, switch)

    def begun(self, decision: Decision) -> None:
        """Somebody acts on it: of each pool that it changes nothing more is wanted until that is done."""
        for role in WORKER_ROLES:
            if decision.of(role).delta:
                self._begun[role] = (decision.at_s, decision.of(role).current)
                self._outlook.forget_spare(role)
        if decision.switch is not None:
            self._switched_at_s = decision.at_s

    def switched_after(self, switch_s: float) -> None:
        """So long a switch took; the next ones are the rarer, the longer it takes."""
        self._switch_s = switch_s

    def _note_done(self, seen: Observation) -> None:
        for role, (at_s, num_then) in list(self._begun.items()):
            count = seen.count(role)
            is_seen = count.num_to_be != num_then and not count.is_changing
            if is_seen or seen.at_s - at_s > _UNSEEN_AFTER * self._settings.start_s:
                del self._begun[role]

    def _wish(self, role: WorkerRole, seen: Observation) -> PoolDecision:
        """Of one pool by itself."""
        settings, count, at_s = self._settings, seen.count(role), seen.at_s
        current, floor = count.num_to_be, max(self._outlook.floor.of(role), settings.least.of(role))
        if self._outlook.is_model_wrong:
            # What the model asks for is not asked for, and nothing is taken away.
            floor = min(current, floor) if settings.fallback is None else settings.fallback.of(role)
        wish = PoolDecision(current, current, floor, Reason.HOLD)
        if count.is_changing or role in self._begun:
            return self._bounded(role, self._enlarged(role, wish, count))
        pressed = self._pressure.of(role)
        if pressed is not None and current + 1 > floor:
            wish = replace(wish, wanted=current + 1, reason=pressed)
        elif floor > current:
            is_static = self._outlook.is_model_wrong
            wish = replace(wish, wanted=floor, reason=Reason.STATIC if is_static else Reason.FLOOR)
        elif current - 1 >= floor and self._outlook.has_spare(role, at_s) and not self._pressure.is_any(role):
            wish = self._down(role, wish, at_s)
        return self._bounded(role, wish)

    def _enlarged(self, role: WorkerRole, wish: PoolDecision, count: PoolCount) -> PoolDecision:
        """Who starts is counted already: a floor that has risen meanwhile makes the same order larger."""
        is_seen = role not in self._begun or count.num_to_be != self._begun[role][1]
        if wish.floor > wish.current and is_seen and count.draining == 0 and not self._outlook.is_model_wrong:
            return replace(wish, wanted=wish.floor, reason=Reason.FLOOR)
        return replace(wish, reason=Reason.PENDING)

    def _down(self, role: WorkerRole, wish: PoolDecision, at_s: float) -> PoolDecision:
        if self._outlook.is_model_wrong:
            return replace(wish, reason=Reason.STATIC)
        if self._reversals[role].is_alarming(at_s):
            return replace(wish, reason=Reason.OSCILLATING)
        return replace(wish, wanted=wish.current - 1, reason=Reason.SPARE)

    def _bounded(self, role: WorkerRole, wish: PoolDecision) -> PoolDecision:
        wanted = min(max(wish.wanted, self._settings.least.of(role)), self._settings.most.of(role))
        return wish if wanted == wish.wanted else replace(wish, wanted=wanted, reason=Reason.BOUND)

    def _try_switch(self, wishes: dict[WorkerRole, PoolDecision], seen: Observation) -> Switch | None:
        """Before a worker is started: one of the other pool, where that is idle enough. Changes the wishes."""
        dwell_s = max(self._settings.dwell_s, _DWELL_SWITCHES * self._switch_s)
        if not self._settings.may_switch or seen.at_s - self._switched_at_s < dwell_s:
            return None
        for role in WORKER_ROLES:
            giver = other_role(role)
            given = wishes[giver]
            if wishes[role].delta > 0 and self._may_give(giver, given, seen):
                wanted = min(given.wanted, given.current - 1)
                wishes[giver] = replace(given, wanted=wanted, reason=Reason.SWITCHED)
                return Switch(giver, role)
        return None

    def _may_give(self, giver: WorkerRole, wish: PoolDecision, seen: Observation) -> bool:
        """Never the last of its role, nor one that its own pool needs or may need soon."""
        count = seen.count(giver)
        is_settled = not count.is_changing and giver not in self._begun and wish.delta <= 0
        can_go = count.serving - 1 >= max(1, self._settings.least.of(giver), wish.floor)
        if not (is_settled and can_go) or self._pressure.is_any(giver):
            return False
        if self._outlook.is_model_wrong or self._reversals[giver].is_alarming(seen.at_s):
            return False
        load = self._outlook.load
        tokens = 0.0 if load is None else load.mean_uncached_tokens
        busy = self._pressure.busy_share(giver, seen, self._window.rate_a_s, tokens)
        # What is left must not be busier than a pool may be that gives.
        return busy * count.serving / max(1, count.serving - 1) < self._settings.idle_share

    def _decision(self, seen: Observation, wishes: dict[WorkerRole, PoolDecision], switch: Switch | None) -> Decision:
        self._num_decisions += 1
        load, prediction = self._outlook.load, self._outlook.prediction
        return Decision(
            number=self._num_decisions,
            at_s=seen.at_s,
            prefill=wishes["prefill"],
            decode=wishes["decode"],
            switch=switch,
            rate_a_s=self._window.rate_a_s,
            predicted_rate_a_s=math.nan if load is None else load.rate_a_s,
            predicted_ttft_s=prediction.ttft_s,
            predicted_itl_s=prediction.itl_s,
            predicted_attainment=prediction.attainment,
            is_fallback=self._outlook.is_model_wrong,
            num_reversals=sum(self._reversals[role].num(seen.at_s) for role in WORKER_ROLES),
        )

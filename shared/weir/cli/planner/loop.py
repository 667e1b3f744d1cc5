"""What is done at each look: a decision, told and, where that is wanted, begun."""

import time

from weir.cli.planner.figures import FiguresMissing
from weir.cli.planner.page import DecisionLog, PlannerPage
from weir.cli.planner.watch import StackWatch
from weir.client.workers import WorkersClient, WorkerView
from weir.core.errors import WeirError
from weir.core.roles import WORKER_ROLES, WorkerRole
from weir.planner.decision import Decision, only_more
from weir.planner.planner import Planner

_LOST_AFTER_S = 300.0
"""A change of role that has not come after so long beyond the grace period is not waited for."""


class PlannerLoop:
    """`actor`: through whom roles are changed and spares used; None: only advice is given. `max_spares`: so many
    workers that are not needed may rest as spares."""

    def __init__(
        self,
        watch: StackWatch,
        planner: Planner,
        page: PlannerPage,
        log: DecisionLog,
        actor: WorkersClient | None,
        grace_s: float,
        max_spares: int = 0,
    ) -> None:
        self._watch = watch
        self._planner = planner
        self._page = page
        self._log = log
        self._actor = actor
        self._grace_s = grace_s
        self._max_spares = max_spares
        self._awaited: tuple[str, float] | None = None
        """The id that the worker which changes its role will have, and since when."""
        self._missing = ""

    def step(self) -> None:
        """One look. What the stack refuses, or does not say, is told and is no end."""
        try:
            looked = self._watch.look()
        except FiguresMissing as missing:
            self._page.count("looks_without_figures")
            if str(missing) != self._missing:
                self._missing = str(missing)
                self._log.note("missing", figure=self._missing)
            return
        self._missing = ""
        if looked is None:
            return
        seen, workers = looked
        self._note_switched(workers)
        decision = self._planner.decide(seen)
        if decision is None:
            return
        self._page.show(decision)
        self._log.decided(decision)
        if self._actor is None or self._try_use_spares(self._actor, decision, workers):
            return
        if decision.switch is None:
            self._rest(self._actor, decision, workers)
        elif self._awaited is None:
            self._switch(self._actor, decision, workers)

    def _try_use_spares(self, actor: WorkersClient, decision: Decision, workers: list[WorkerView]) -> bool:
        """In place of a switch too: they serve at once, and take nothing from the other pool."""
        role = next((role for role in WORKER_ROLES if decision.of(role).delta > 0), None)
        if role is None or self._awaited is not None:
            return False
        spares = [one for one in workers if one.is_spare and one.duty == "drained"]
        spares.sort(key=lambda one: one.role != role)
        used = [one for one in spares[: decision.of(role).delta] if self._try_use(actor, decision, one, role)]
        if used:
            self._planner.begun(only_more(decision, role, len(used)))
        return bool(used)

    def _try_use(self, actor: WorkersClient, decision: Decision, spare: WorkerView, role: WorkerRole) -> bool:
        began_s = time.monotonic()
        try:
            if spare.role == role:
                actor.end_drain(spare.worker_id)
            else:
                actor.set_role(spare.worker_id, role, grace_s=self._grace_s)
        except WeirError as error:
            self._refused("spare_refused", decision, spare.worker_id, error)
            return False
        took_s = round(time.monotonic() - began_s, 3)
        self._page.count("spares_used")
        self._log.note("spare_used", decision=decision.number, worker=spare.worker_id, role=role, took_s=took_s)
        return True

    def _rest(self, actor: WorkersClient, decision: Decision, workers: list[WorkerView]) -> None:
        """One that is not needed, where there may be another spare."""
        role = next((role for role in WORKER_ROLES if decision.of(role).delta < 0), None)
        if role is None or sum(one.is_spare for one in workers) >= self._max_spares:
            return
        serving = [one for one in workers if one.role == role and one.duty == "serving"]
        worker = min(serving, key=lambda one: one.num_live)
        try:
            actor.drain(worker.worker_id, grace_s=self._grace_s, as_spare=True)
        except WeirError as error:
            self._refused("rest_refused", decision, worker.worker_id, error)
            return
        self._planner.begun(decision)
        self._log.note("rest_begun", decision=decision.number, worker=worker.worker_id)

    def _refused(self, event: str, decision: Decision, worker_id: str, error: WeirError) -> None:
        self._page.count("switches_failed")
        self._log.note(event, decision=decision.number, worker=worker_id, problem=error.message)

    def _switch(self, actor: WorkersClient, decision: Decision, workers: list[WorkerView]) -> None:
        """The worker of the role with the least to do."""
        switch = decision.switch
        assert switch is not None, "asked before"
        serving = [one for one in workers if one.role == switch.from_role and one.duty == "serving"]
        worker = min(serving, key=lambda one: one.num_live)
        try:
            new_id = actor.set_role(worker.worker_id, switch.to_role, grace_s=self._grace_s)
        except WeirError as error:
            self._refused("switch_refused", decision, worker.worker_id, error)
            return
        self._planner.begun(decision)
        self._awaited = (new_id, time.monotonic())
        self._page.count("switches_begun")
        self._log.note("switch_begun", decision=decision.number, worker=worker.worker_id, becomes=new_id)

    def _note_switched(self, workers: list[WorkerView]) -> None:
        if self._awaited is None:
            return
        new_id, since_s = self._awaited
        after_s = time.monotonic() - since_s
        if any(one.worker_id == new_id and one.duty == "serving" for one in workers):
            self._planner.switched_after(after_s)
            self._log.note("switched", worker=new_id, after_s=round(after_s, 3))
            self._awaited = None
        elif after_s > self._grace_s + _LOST_AFTER_S:
            self._page.count("switches_failed")
            self._log.note("switch_lost", worker=new_id, after_s=round(after_s, 3))
            self._awaited = None

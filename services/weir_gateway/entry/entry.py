"""The way in: who calls, whether there is room for another, and each at its turn."""

import random
from collections import Counter
from collections.abc import Callable, Iterable

from weir.bus.endpoint import BusEndpoint
from weir.bus.queue_report import QueueReport
from weir.bus.subjects import Subjects
from weir.core.clock import Clock
from weir.core.errors import Overloaded, QuotaExceeded, WeirError
from weir.core.shares import SHARE_BOUND
from weir_gateway.access import AccessControl, Caller
from weir_gateway.driving.open_request import OpenRequest
from weir_gateway.entry.gate import EntryGate, EntryRefusal
from weir_gateway.entry.pace import Pace
from weir_gateway.entry.queue_view import QueueKey, Ticket

_NUM_A_TURN = 2
_OF_A_TENANT = {"tenant_share": SHARE_BOUND, "tenant_full": "max_queued"}
"""reason -> the bound that is reached."""


class Entry:
    """Refuses at once who has no chance to be served in time; `access` knows the callers."""

    def __init__(
        self, access: AccessControl, max_requests: int, clock: Clock, draw: Callable[[], float] = random.random
    ) -> None:
        self.access = access
        self._gate = EntryGate(max_requests, draw)
        self._pace = Pace(_NUM_A_TURN)
        self._clock = clock
        self._num_refused: Counter[str] = Counter()
        self._num_reports = 0

    async def follow(self, endpoint: BusEndpoint, subjects: Subjects) -> None:
        """From now on by the scheduler's reports."""
        await endpoint.serve(subjects.queues, QueueReport, self._on_report, max_pending=16)

    def check_caller(self, caller: Caller, models: Iterable[str]) -> None:
        """Before anything is read. Raises Overloaded, or QuotaExceeded, where no request of the caller is let in,
        whichever of `models` it is for."""
        verdict = self._gate.try_refuse_any(caller, models, caller.lanes, self._clock.now_s())
        self._check(verdict, caller.tenant)

    def admit(self, caller: Caller, model: str, lane: str, num: int) -> Ticket:
        """To be given back by `leave`. Raises Overloaded, or QuotaExceeded, with the time to try again."""
        self._check(self._gate.try_refuse(caller, model, lane, num, self._clock.now_s()), caller.tenant)
        return self._gate.enter(QueueKey(model, lane, caller.tenant), num)

    async def turn(self) -> None:
        """Returns when the next request that was admitted may begin."""
        await self._pace.turn()

    def follow_request(self, ticket: Ticket, opened: OpenRequest) -> None:
        """Until it has ended."""
        ticket.is_submitted = lambda: all(state.is_admitted for state in opened.states)
        opened.ended.add_done_callback(lambda _: self.leave(ticket))

    def leave(self, ticket: Ticket) -> None:
        self._gate.leave(ticket, self._clock.now_s())

    def metrics(self) -> dict[str, float]:
        refused = {f"entry_refused_{reason}_total": float(num) for reason, num in self._num_refused.items()}
        return {
            "entry_refused_total": float(self._num_refused.total()),
            "entry_waiting": float(self._pace.num_waiting),
            "entry_held": float(self._gate.num_held),
            "queue_reports_total": float(self._num_reports),
            "queue_report_age_s": min(self._gate.report_age_s(self._clock.now_s()), 3600.0),
            **refused,
        }

    async def _on_report(self, report: QueueReport) -> None:
        self._num_reports += self._gate.report(report, self._clock.now_s())

    def _check(self, verdict: EntryRefusal | None, tenant: str) -> None:
        if verdict is None:
            return
        self._num_refused[verdict.reason] += 1
        error: WeirError
        if verdict.reason in _OF_A_TENANT:
            bound = _OF_A_TENANT[verdict.reason]
            error = QuotaExceeded(verdict.message, retry_after_s=verdict.retry_after_s, tenant=tenant, bound=bound)
        else:
            error = Overloaded(verdict.message, retry_after_s=verdict.retry_after_s)
        raise error

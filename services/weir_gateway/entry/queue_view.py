"""The queues as the scheduler reported them last, and what this gateway has let in since."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from weir.bus.queue_report import LaneReport, QueueReport

_STALE_S = 10.0
"""A report this old says nothing any more. Longer than the event loop takes to hear of a burst, reports behind it."""


class QueueKey(NamedTuple):
    """Whose requests, where."""

    model: str
    lane: str
    tenant: str


@dataclass(slots=True, eq=False)
class Ticket:
    """One that was let in: `num` requests, for each choice one."""

    key: QueueKey
    num: int
    is_submitted: Callable[[], bool] = field(default=lambda: False)
    """Whether the scheduler has answered, so that its reports have it."""
    was_submitted: bool = False
    """When the last report came."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """What a new request of a tenant would find."""

    lane: LaneReport
    num_ahead: int
    """For whose ends it would wait, if tenants take turns."""
    num_own: int
    """The tenant's own in this lane."""
    num_in_lane: int
    """Of all models."""

    @property
    def wait_s(self) -> float:
        """0.0: nobody is before it, or it is not known how fast they go."""
        return self.num_ahead * self.lane.s_per_request


class QueueView:
    """What was let in counts beside the reports until the second one after the scheduler's answer: where the event loop
    is late, a report that lacks it may be read after the answer."""

    def __init__(self) -> None:
        self._epoch = 0
        self._reported_at_s = float("-inf")
        self._lanes: dict[tuple[str, str], LaneReport] = {}
        self._bounds: dict[str, tuple[int, int]] = {}
        """tenant -> how many wait and may wait, of those that have a bound."""
        self._unreported: dict[Ticket, None] = {}
        self._num_unreported: Counter[QueueKey] = Counter()

    def update(self, report: QueueReport, now_s: float) -> bool:
        """False: it is of a scheduler that was replaced."""
        if report.epoch < self._epoch:
            return False
        self._epoch = report.epoch
        self._reported_at_s = now_s
        self._lanes = {(lane.model, lane.lane): lane for lane in report.lanes}
        self._bounds = {tenant.tenant: (tenant.num_queued, tenant.max_queued) for tenant in report.tenants}
        for ticket in [ticket for ticket in self._unreported if ticket.was_submitted]:
            self.leave(ticket)
        for ticket in self._unreported:
            ticket.was_submitted = ticket.is_submitted()
        return True

    def age_s(self, now_s: float) -> float:
        return now_s - self._reported_at_s

    def let_in(self, ticket: Ticket) -> None:
        self._unreported[ticket] = None
        self._num_unreported[ticket.key] += ticket.num

    def leave(self, ticket: Ticket) -> None:
        """It is reported, or gone; a second time nothing happens."""
        if ticket not in self._unreported:
            return
        del self._unreported[ticket]
        self._num_unreported[ticket.key] -= ticket.num
        if not self._num_unreported[ticket.key]:
            del self._num_unreported[ticket.key]

    def try_ahead(self, key: QueueKey, now_s: float) -> Ahead | None:
        """None: nobody waits there, or nothing was heard for too long."""
        lane = self._lanes.get((key.model, key.lane))
        if lane is None or self.age_s(now_s) > _STALE_S:
            return None
        added = Counter[str]()
        for other, num in self._num_unreported.items():
            if (other.model, other.lane) == (key.model, key.lane):
                added[other.tenant] += num
        num_all = lane.num_queued + added.total()
        by_tenant = {tenant.tenant: tenant.num_queued for tenant in lane.tenants}
        if "" in by_tenant:  # tenants do not take turns
            num_ahead, num_own = num_all, 0
        else:
            num_own = by_tenant.get(key.tenant, 0) + added[key.tenant]
            num_tenants = len(by_tenant.keys() | added.keys() | {key.tenant})
            num_ahead = min((num_own + 1) * num_tenants - 1, num_all)
        return Ahead(lane, max(0, num_ahead - lane.num_free), num_own, lane.num_queued_of_all_models + added.total())

    def try_bound(self, tenant: str, now_s: float) -> tuple[int, int] | None:
        """How many requests of a tenant wait in all lanes, and may wait; None: it has none waiting, or no bound."""
        bound = self._bounds.get(tenant)
        if bound is None or self.age_s(now_s) > _STALE_S:
            return None
        num_added = sum(num for key, num in self._num_unreported.items() if key.tenant == tenant)
        return bound[0] + num_added, bound[1]

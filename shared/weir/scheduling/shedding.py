"""Giving up what cannot be served within bounds, from the least urgent lane up and there the latest first."""

from collections.abc import Iterator

from weir.bus.messages import RefusalReason, Submit
from weir.scheduling.admission import Refusal
from weir.scheduling.ledger import Ledger
from weir.scheduling.limits import CoreLimits
from weir.scheduling.rate import Rates
from weir.scheduling.request import Request

_DOUBT = 1.5
"""An estimated wait must be this many times too long."""
_MAX_AT_ONCE = 256


class Shedding:
    """What waits longer than it may is given up when that is foreseen, and not after it has waited for nothing."""

    def __init__(self, limits: CoreLimits, ledger: Ledger, rates: Rates) -> None:
        self._limits = limits
        self._ledger = ledger
        self._rates = rates

    def try_victim(self, lane: str) -> Request | None:
        """Who makes room for a new request of the lane when all queues together are full: somebody less urgent."""
        for other in reversed(self._limits.lanes):
            if other.name == lane:
                return None
            victim = self._ledger.lanes.newest_of(other.name)
            if victim is not None:
                return victim
        return None

    def is_full(self) -> bool:
        return len(self._ledger.lanes) >= self._limits.max_queued

    def full(self, submit: Submit, lane: str, now_s: float) -> Refusal:
        """What a request is told for which nobody makes room."""
        num_ahead = self._ledger.lanes.num_ahead(submit.model, lane)
        message = f"{self._limits.max_queued} requests wait in all lanes, none of them less urgent"
        return Refusal(RefusalReason.SHED, message, self._rates.retry_after_ms(submit.model, num_ahead, now_s))

    def try_refuse(self, submit: Submit, lane: str, now_s: float) -> Refusal | None:
        """A new request that would wait for too long."""
        max_wait_s = self._limits.lanes_by_name[lane].max_wait_s
        if submit.deadline_ms:
            max_wait_s = min(max_wait_s, submit.deadline_ms / 1000)
        num_ahead = self._ledger.lanes.num_ahead(submit.model, lane)
        wait_s = self._rates.wait_s(submit.model, num_ahead, now_s)
        return self._shed(submit.model, lane, num_ahead, wait_s, max_wait_s, now_s) if wait_s else None

    def overdue(self, now_s: float) -> Iterator[tuple[Request, Refusal]]:
        """Queued requests that will have waited too long before it is their turn, the least urgent and latest first;
        the caller removes each before it takes the next. Bounded in number."""
        lanes = self._ledger.lanes
        num_left = _MAX_AT_ONCE
        for model in lanes.models():
            for lane in reversed(self._limits.lanes):
                while num_left and (request := lanes.newest_of(lane.name, model)) is not None:
                    num_ahead = lanes.num_ahead(model, lane.name) - 1
                    wait_s, left_s = self._rates.wait_s(model, num_ahead, now_s), request.expires_at_s - now_s
                    refusal = self._shed(model, lane.name, num_ahead, wait_s, left_s, now_s)
                    if refusal is None:
                        break
                    num_left -= 1
                    yield request, refusal

    def _shed(
        self, model: str, lane: str, num_ahead: int, wait_s: float, max_wait_s: float, now_s: float
    ) -> Refusal | None:
        if wait_s <= _DOUBT * max_wait_s:
            return None
        message = (
            f"lane {lane}: {num_ahead} requests before it take about {wait_s:.0f} s, it may wait {max_wait_s:.0f} s"
        )
        num_too_many = num_ahead * (1 - max_wait_s / wait_s)
        return Refusal(RefusalReason.SHED, message, self._rates.retry_after_ms(model, num_too_many, now_s))

"""Giving up what cannot be served within bounds, from the least urgent lane up and there the latest first."""

from collections.abc import Iterator

from weir.bus.messages import RefusalReason, Submit
from weir.scheduling.admission.request_closer import RequestCloser
from weir.scheduling.commands import Refusal
from weir.scheduling.limits.core_limits import CoreLimits
from weir.scheduling.queues.rate import Rates
from weir.scheduling.request import ScheduledRequest
from weir.scheduling.request_table import RequestTable

_DOUBT = 1.5
"""An estimated wait must be this many times too long."""
_MAX_AT_ONCE = 256


class Shedding:
    """What would wait longer than it may is given up when that is estimated, not after it has waited for nothing."""

    def __init__(self, limits: CoreLimits, requests: RequestTable, rates: Rates, closer: RequestCloser) -> None:
        self._limits = limits
        self._requests = requests
        self._rates = rates
        self._closer = closer

    def try_refuse(self, submit: Submit, now_s: float) -> Refusal | None:
        """None: a new request may wait. Where all queues together are full, somebody less urgent is revoked for it."""
        lane = self._requests.factory.lane_of(submit)
        max_wait_s = self._limits.lanes_by_name[lane].max_wait_s
        if submit.deadline_ms:
            max_wait_s = min(max_wait_s, submit.deadline_ms / 1000)
        tenant = self._limits.tenant(submit.tenant).name
        num_ahead = self._requests.lanes.num_ahead(submit.model, lane, tenant)
        refusal = self._try_shed(submit.model, lane, num_ahead, max_wait_s, now_s)
        if refusal is not None or len(self._requests.lanes) < self._limits.max_queued:
            return refusal
        victim = self._try_victim(lane)
        if victim is None:
            return self._full(submit.model, lane, now_s)
        self._closer.revoke(victim, self._full(victim.submit.model, victim.lane, now_s), now_s)
        return None

    def give_up(self, now_s: float) -> None:
        """Revokes queued requests that have waited too long, or will have before it is their turn."""
        for request in self._requests.lanes.expired(now_s):
            message = f"lane {request.lane} had no room for it within {now_s - request.queued_at_s:.1f} s"
            model = request.submit.model
            num_ahead = self._requests.lanes.num_ahead(model, request.lane)
            retry_after_ms = self._rates.retry_after_ms(model, num_ahead, now_s)
            self._closer.revoke(request, Refusal(RefusalReason.WAITED_TOO_LONG, message, retry_after_ms), now_s)
        for request, refusal in self._overdue(now_s):
            self._closer.revoke(request, refusal, now_s)

    def _overdue(self, now_s: float) -> Iterator[tuple[ScheduledRequest, Refusal]]:
        """The least urgent and latest first; the caller removes each before it takes the next. Bounded in number."""
        lanes = self._requests.lanes
        num_left = _MAX_AT_ONCE
        for model in lanes.models():
            for lane in reversed(self._limits.lanes):
                while num_left and (request := lanes.newest_of(lane.name, model)) is not None:
                    num_ahead = lanes.num_ahead(model, lane.name, request.tenant, is_queued=True)
                    refusal = self._try_shed(model, lane.name, num_ahead, request.expires_at_s - now_s, now_s)
                    if refusal is None:
                        break
                    num_left -= 1
                    yield request, refusal

    def _try_shed(self, model: str, lane: str, num_ahead: int, max_wait_s: float, now_s: float) -> Refusal | None:
        """None: by estimate a request of the lane does not wait for too long, with so many before it."""
        wait_s = self._rates.wait_s(model, num_ahead, now_s)
        if wait_s <= _DOUBT * max_wait_s:
            return None
        message = f"lane {lane}: {num_ahead} requests first take about {wait_s:.0f} s, it may wait {max_wait_s:.0f} s"
        num_too_many = num_ahead * (1 - max_wait_s / wait_s)
        return Refusal(RefusalReason.SHED, message, self._rates.retry_after_ms(model, num_too_many, now_s))

    def _try_victim(self, lane: str) -> ScheduledRequest | None:
        """The latest of the least urgent lane below this one that has any."""
        for other in reversed(self._limits.lanes):
            if other.name == lane:
                return None
            victim = self._requests.lanes.newest_of(other.name)
            if victim is not None:
                return victim
        return None

    def _full(self, model: str, lane: str, now_s: float) -> Refusal:
        message = f"{self._limits.max_queued} requests wait in all lanes, and lane {lane} is the least urgent of them"
        num_ahead = self._requests.lanes.num_ahead(model, lane)
        return Refusal(RefusalReason.SHED, message, self._rates.retry_after_ms(model, num_ahead, now_s))

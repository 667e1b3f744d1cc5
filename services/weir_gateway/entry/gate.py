"""Whether a request is let in, and when to try again if not: pure, and cheap enough to be asked by everybody.

    too many here? ─> too many of its tenant? ─> lane full? ─> estimated wait over max_wait_s? ─> let in
      this gateway's     where there are others,                  requests before it, at the pace
      max_requests       and by its max_queued                    at which those of the lane end

What the scheduler would refuse or give up later is refused here, before its prompt is tokenized. Of what it does not
know it lets pass: the scheduler decides.
"""

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from weir.bus.queue_report import QueueReport
from weir.core.shares import Holder, has_share
from weir_gateway.entry.queue_view import Ahead, QueueKey, QueueView, Ticket

_FULL_PART = 0.8
"""Of `max_wait_s`: an estimate is not exact, and who is let in should not be given up while it waits."""
_COME_BACK_PART = 0.5
"""Asked to come back when the queue is this part of what is allowed: then there is room for as many as drained."""
_ALWAYS = 2
"""So many requests of a tenant are let in whatever the share says."""
_UNKNOWN_RETRY_S = 2.0
_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 60.0
_JITTER = 0.25
_MIN_ENDS, _NUM_ENDS = 2, 256
_ENDS_WINDOW_S = 30.0


class EntryRefusal(NamedTuple):
    """Why a request is not let in, in a sentence, and seconds until it makes sense to try again."""

    reason: str
    message: str
    retry_after_s: float


class EntryGate:
    """Counts whom it let in until they have ended. `draw`: from 0 to 1, spreads those that are told to come back."""

    def __init__(self, max_requests: int, draw: Callable[[], float]) -> None:
        self._max_requests = max_requests
        self._draw = draw
        self._view = QueueView()
        self._num_held: Counter[str] = Counter()
        """By tenant."""
        self._ended_at_s: deque[float] = deque(maxlen=_NUM_ENDS)

    @property
    def num_held(self) -> int:
        """Let in, and not ended."""
        return self._num_held.total()

    def report(self, report: QueueReport, now_s: float) -> bool:
        """What the scheduler says of its queues. False: another one leads."""
        return self._view.update(report, now_s)

    def report_age_s(self, now_s: float) -> float:
        return self._view.age_s(now_s)

    def try_refuse(self, caller: Holder, model: str, lane: str, num: int, now_s: float) -> EntryRefusal | None:
        """None: `num` requests more are let in, if they come."""
        return self._try_refuse_for_room(caller, num, now_s) or self._try_refuse_for_queue(caller, model, lane, now_s)

    def try_refuse_any(
        self, caller: Holder, models: Iterable[str], lanes: Iterable[str], now_s: float
    ) -> EntryRefusal | None:
        """Of a request that is not read yet, for one of these models in one of these lanes. None: there may be one of
        this caller that is let in."""
        verdict = self._try_refuse_for_room(caller, 1, now_s)
        if verdict is not None:
            return verdict
        keys = list(itertools.product(models, lanes))
        verdicts = [self._try_refuse_for_queue(caller, model, lane, now_s) for model, lane in keys]
        found = [one for one in verdicts if one is not None]
        return min(found, key=lambda one: one.retry_after_s) if found and len(found) == len(keys) else None

    def enter(self, key: QueueKey, num: int) -> Ticket:
        """They come in, and count until they leave."""
        ticket = Ticket(key, num)
        self._num_held[key.tenant] += num
        self._view.let_in(ticket)
        return ticket

    def leave(self, ticket: Ticket, now_s: float) -> None:
        """They have ended; once."""
        self._view.leave(ticket)
        self._num_held[ticket.key.tenant] -= ticket.num
        if not self._num_held[ticket.key.tenant]:
            del self._num_held[ticket.key.tenant]
        self._ended_at_s.append(now_s)

    def _try_refuse_for_room(self, caller: Holder, num: int, now_s: float) -> EntryRefusal | None:
        num_held, num_own = self.num_held, self._num_held[caller.tenant]
        if num_held + num > self._max_requests:
            message = f"{num_held} requests are in flight, at most {self._max_requests}; try again later"
            return EntryRefusal("gateway_full", message, self._spread(self._ends_s(num_held, now_s)))
        if caller.has_peers and not has_share(num_own, num, self._max_requests - num_held, _ALWAYS):
            message = (
                f"tenant {caller.tenant}: {num_own} of its requests are in flight here, which is its share of the "
                f"{self._max_requests} that this gateway takes; try again later"
            )
            return EntryRefusal("tenant_share", message, self._spread(self._ends_s(num_own, now_s)))
        return None

    def _try_refuse_for_queue(self, caller: Holder, model: str, lane_name: str, now_s: float) -> EntryRefusal | None:
        key = QueueKey(model, lane_name, caller.tenant)
        ahead = self._view.try_ahead(key, now_s)
        if ahead is None:
            return None
        lane, retry_s = ahead.lane, self._spread(_come_back_s(ahead))
        if ahead.num_in_lane >= lane.max_queued:
            return EntryRefusal("lane_full", f"lane {lane.lane} is full: {ahead.num_in_lane} requests wait", retry_s)
        num_left = lane.max_queued - ahead.num_in_lane
        if caller.has_peers and not has_share(ahead.num_own, 1, num_left, _ALWAYS):
            message = f"tenant {key.tenant}: {ahead.num_own} requests wait in lane {lane.lane}, its share of it"
            return EntryRefusal("tenant_share", message, retry_s)
        bound = self._view.try_bound(key.tenant, now_s)
        if bound is not None and bound[0] >= bound[1]:
            return EntryRefusal(
                "tenant_full", f"tenant {key.tenant}: {bound[1]} requests wait, its max_queued", retry_s
            )
        if ahead.wait_s > _FULL_PART * lane.max_wait_s:
            message = (
                f"lane {lane.lane}: with {ahead.num_ahead} requests before it, it would wait for about "
                f"{ahead.wait_s:.0f} s, which may be {lane.max_wait_s:g} s; try again later"
            )
            return EntryRefusal("long_wait", message, retry_s)
        return None

    def _ends_s(self, num: int, now_s: float) -> float | None:
        """How long it takes until half of `num` have ended, by those that ended here lately; None: not known."""
        while self._ended_at_s and self._ended_at_s[0] < now_s - _ENDS_WINDOW_S:
            self._ended_at_s.popleft()
        if len(self._ended_at_s) < _MIN_ENDS:
            return None
        return (1 - _COME_BACK_PART) * num * (now_s - self._ended_at_s[0]) / len(self._ended_at_s)

    def _spread(self, seconds: float | None) -> float:
        bounded = _UNKNOWN_RETRY_S if seconds is None else min(max(seconds, _MIN_RETRY_S), _MAX_RETRY_S)
        return bounded * (1 + _JITTER * self._draw())


def _come_back_s(ahead: Ahead) -> float | None:
    """When the queue is short again; None: not known."""
    lane = ahead.lane
    if not lane.s_per_request:
        return None
    allowed_s = min(_FULL_PART * lane.max_wait_s, lane.max_queued * lane.s_per_request)
    return max(0.0, ahead.wait_s - _COME_BACK_PART * allowed_s)

"""Requests that ended: whatever still comes for one of them, late or twice, is answered and starts nothing.

Its gateway ends a request for good. What the scheduler refused or gave up while it waited is over up to that dispatch,
and never if its gateway holds a grant: another scheduler made it, and a gateway is believed what it runs.
"""

from collections import OrderedDict
from typing import NamedTuple

from weir.bus.messages import HeldRequest, Submit, SubmitReply


class _Tombstone(NamedTuple):
    reply: SubmitReply
    answers_until_s: float
    expires_at_s: float
    dispatch: int | None

    def covers(self, dispatch: int) -> bool:
        return self.dispatch is None or dispatch <= self.dispatch


class EndedRequests:
    """At most `max_count`, each for `ttl_s`; over the bound the oldest goes first."""

    def __init__(self, max_count: int, ttl_s: float) -> None:
        self._max_count = max_count
        self._ttl_s = ttl_s
        self._tombstones: OrderedDict[str, _Tombstone] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tombstones)

    def ids(self) -> list[str]:
        return list(self._tombstones)

    def put(self, request_id: str, reply: SubmitReply, now_s: float, *, dispatch: int | None = None) -> None:
        """`reply` answers a Submit of the request from now on; one that says when to try again, until then.

        `dispatch`: the newest one that is over; None: its gateway ended it.
        """
        answers_for_s = reply.retry_after_ms / 1000 if reply.retry_after_ms else self._ttl_s
        self._tombstones.pop(request_id, None)
        self._tombstones[request_id] = _Tombstone(reply, now_s + answers_for_s, now_s + self._ttl_s, dispatch)
        if len(self._tombstones) > self._max_count:
            self._tombstones.popitem(last=False)

    def remove(self, request_id: str) -> None:
        self._tombstones.pop(request_id, None)

    def try_reply(self, submit: Submit, now_s: float) -> SubmitReply | None:
        tombstone = self._tombstones.get(submit.request_id)
        is_answer = tombstone is not None and tombstone.covers(submit.dispatch) and now_s < tombstone.answers_until_s
        return tombstone.reply if tombstone is not None and is_answer else None

    def covers(self, entry: HeldRequest) -> bool:
        """Whether its gateway holds a request that is over: it has not heard of it yet."""
        tombstone = self._tombstones.get(entry.submit.request_id)
        if tombstone is None:
            return False
        return tombstone.dispatch is None if entry.placement is not None else tombstone.covers(entry.submit.dispatch)

    def expire(self, now_s: float) -> None:
        while self._tombstones and next(iter(self._tombstones.values())).expires_at_s <= now_s:
            self._tombstones.popitem(last=False)

"""Requests that ended: whatever still comes for one of them, late or twice, is answered and starts nothing."""

from collections import OrderedDict
from typing import NamedTuple

from weir.bus.messages import SubmitReply


class _Tombstone(NamedTuple):
    reply: SubmitReply
    answers_until_s: float
    expires_at_s: float


class Tombstones:
    """At most `max_count`, each for `ttl_s`; over the bound the oldest goes first."""

    def __init__(self, max_count: int, ttl_s: float) -> None:
        self._max_count = max_count
        self._ttl_s = ttl_s
        self._stones: OrderedDict[str, _Tombstone] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stones)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._stones

    def ids(self) -> list[str]:
        return list(self._stones)

    def put(self, request_id: str, reply: SubmitReply, now_s: float) -> None:
        """`reply` answers a Submit of the request from now on; one that says when to try again, until then."""
        answers_for_s = reply.retry_after_ms / 1000 if reply.retry_after_ms else self._ttl_s
        self._stones.pop(request_id, None)
        self._stones[request_id] = _Tombstone(reply, now_s + answers_for_s, now_s + self._ttl_s)
        if len(self._stones) > self._max_count:
            self._stones.popitem(last=False)

    def remove(self, request_id: str) -> None:
        self._stones.pop(request_id, None)

    def try_reply(self, request_id: str, now_s: float) -> SubmitReply | None:
        stone = self._stones.get(request_id)
        return stone.reply if stone is not None and now_s < stone.answers_until_s else None

    def expire(self, now_s: float) -> None:
        while self._stones and next(iter(self._stones.values())).expires_at_s <= now_s:
            self._stones.popitem(last=False)

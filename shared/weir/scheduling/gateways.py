"""The gateways that are alive and which requests each of them holds, and the requests that ended.

Whatever still comes for a request that ended, late or twice, is answered and starts nothing. Its gateway ends a request
for good. What the scheduler refused or gave up while it waited is over up to that dispatch, and never if its gateway
holds a grant: another scheduler made it, and a gateway is believed what it runs.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from weir.bus.messages import Held, HeldRequest, Submit, SubmitReply


@dataclass(slots=True)
class _Gateway:
    heard_at_s: float
    sequence: int = -1
    parts: set[int] = field(default_factory=set)
    listed: set[str] = field(default_factory=set)
    """Requests in the parts of `sequence` that have come."""
    request_ids: set[str] = field(default_factory=set)
    """Requests of the gateway in the scheduler's table."""
    lost_since_s: float | None = None


class Gateways:
    """A gateway that sends no list for `ttl_s` is gone."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._gateways: dict[str, _Gateway] = {}

    def __len__(self) -> int:
        return len(self._gateways)

    def __contains__(self, gateway_id: str) -> bool:
        return gateway_id in self._gateways

    @property
    def num_requests(self) -> int:
        return sum(len(gateway.request_ids) for gateway in self._gateways.values())

    def has_request(self, gateway_id: str, request_id: str) -> bool:
        gateway = self._gateways.get(gateway_id)
        return gateway is not None and request_id in gateway.request_ids

    def requests_of(self, gateway_id: str) -> list[str]:
        gateway = self._gateways.get(gateway_id)
        return sorted(gateway.request_ids) if gateway else []

    def add_request(self, gateway_id: str, request_id: str, now_s: float) -> None:
        gateway = self._gateways.get(gateway_id)
        if gateway is None:
            gateway = self._gateways[gateway_id] = _Gateway(now_s)
        gateway.request_ids.add(request_id)

    def remove_request(self, gateway_id: str, request_id: str) -> None:
        gateway = self._gateways.get(gateway_id)
        if gateway is not None:
            gateway.request_ids.discard(request_id)

    def hear(self, held: Held, now_s: float) -> bool:
        """Takes one message in. False: it is late or came before, so that it changes nothing."""
        gateway = self._gateways.setdefault(held.gateway_id, _Gateway(now_s))
        if held.sequence < gateway.sequence or (held.sequence == gateway.sequence and held.part in gateway.parts):
            return False
        if held.sequence > gateway.sequence:
            gateway.sequence = held.sequence
            gateway.parts.clear()
            gateway.listed.clear()
        gateway.heard_at_s, gateway.lost_since_s = now_s, None
        gateway.parts.add(held.part)
        gateway.listed.update(entry.submit.request_id for entry in held.requests)
        return True

    def missing_from(self, held: Held) -> list[str]:
        """Known requests that the list lacks; none while parts of it are outstanding."""
        gateway = self._gateways[held.gateway_id]
        return sorted(gateway.request_ids - gateway.listed) if len(gateway.parts) >= held.num_parts else []

    def lose(self, gateway_id: str, now_s: float) -> bool:
        """It is silent for too long. False: that is known already."""
        gateway = self._gateways.get(gateway_id)
        if gateway is None or gateway.lost_since_s is not None:
            return False
        gateway.lost_since_s = now_s
        return True

    def lost_since_s(self, gateway_id: str) -> float:
        """Of one that is lost."""
        gateway = self._gateways.get(gateway_id)
        return float("-inf") if gateway is None or gateway.lost_since_s is None else gateway.lost_since_s

    def remove(self, gateway_id: str) -> None:
        self._gateways.pop(gateway_id, None)

    def expired(self, now_s: float) -> list[str]:
        return [
            gateway_id for gateway_id, gateway in self._gateways.items() if now_s - gateway.heard_at_s > self._ttl_s
        ]

    def excuse_silence(self, now_s: float) -> None:
        """Nobody could be heard until now."""
        for gateway in self._gateways.values():
            gateway.heard_at_s = now_s


class _Tombstone(NamedTuple):
    reply: SubmitReply
    answers_until_s: float
    expires_at_s: float
    dispatch: int | None

    def covers(self, dispatch: int) -> bool:
        return self.dispatch is None or dispatch <= self.dispatch


class EndedRequests:
    """Tombstones: at most `max_count`, each for `ttl_s`; over the bound the oldest goes first."""

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

"""The gateways that are alive, and which requests each of them holds."""

from dataclasses import dataclass, field

from weir.bus.messages import Held


@dataclass(slots=True)
class _Gateway:
    heard_at_s: float
    sequence: int = -1
    parts: set[int] = field(default_factory=set)
    listed: set[str] = field(default_factory=set)
    """Requests in the parts of `sequence` that have come."""
    request_ids: set[str] = field(default_factory=set)
    """Requests of the gateway that the scheduler knows."""


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
        gateway.heard_at_s = now_s
        gateway.parts.add(held.part)
        gateway.listed.update(entry.submit.request_id for entry in held.requests)
        return True

    def missing_from(self, held: Held) -> list[str]:
        """Known requests that the list lacks; none while parts of it are outstanding."""
        gateway = self._gateways[held.gateway_id]
        return sorted(gateway.request_ids - gateway.listed) if len(gateway.parts) >= held.num_parts else []

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

"""Life events of requests in a stream of JetStream: each has one, when it has ended. No text of anybody's is in them.

    gateways ── batches of JSON lines ──> weir.INSTANCE.audit ──> stream, bounded by bytes and age ──> weir audit

A line is a record of the request log with more in it, and so a trace that the simulator reads.
"""

import base64
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from weir.bus.protocol import Bus, BusError, BusRefused, NoResponder
from weir.bus.subjects import Subjects
from weir.core.fields import check_range

AUDIT_VERSION = 1
"""As the request log's: keys are added, none changes its meaning."""
MAX_BATCH = 256
"""Events of one message: about 100 kB."""
_MOST_BYTES = 1 << 44
_MOST_AGE_S = 10 * 366 * 86_400
_API = "$JS.API.STREAM"
_NAME_IN_USE, _NO_MESSAGE = 10058, 10037
"""JetStream's numbers of these errors."""
_STATUS_NOT_FOUND = 404
_DUPLICATES_S = 120
_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class LifeEvent:
    """One request, or one answer of several, from its arrival to its end. Times are Unix times."""

    request_id: str
    gateway_id: str
    arrival_s: float
    at_s: float
    """Of its end."""
    model: str
    tenant: str
    lane: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    max_tokens: int
    outcome: str
    """finished, cancelled, failed, or refused by the scheduler."""
    reason: str
    """Of `finished` what ended the answer (stop, length, deadline), else the kind of error."""
    is_cut: bool
    """At `max_tokens`, so that it might have been longer."""
    ttft_s: float | None = None
    """From its arrival to its first token; None: it had none."""
    predicted_output_tokens: float | None = None
    deadline_s: float | None = None
    """From its arrival; as the targets None where the client named none."""
    ttft_target_s: float | None = None
    itl_target_s: float | None = None

    def to_line(self) -> str:
        """JSON, with the end of the line; what is None is left out."""
        fields = {name: value for name, value in asdict(self).items() if value is not None}
        rounded = {name: round(value, 6) if isinstance(value, float) else value for name, value in fields.items()}
        return json.dumps({"v": AUDIT_VERSION, **rounded}, separators=(",", ":")) + "\n"


@dataclass(frozen=True, slots=True)
class AuditBounds:
    """Over either the oldest events make room. Raises ValueError for what bounds nothing, or keeps nothing."""

    max_bytes: int
    max_age_s: float

    def __post_init__(self) -> None:
        check_range(self, "max_bytes", 1, _MOST_BYTES)
        check_range(self, "max_age_s", 1, _MOST_AGE_S)


class AuditStream:
    """The stream of an instance. Every method may raise BusError."""

    def __init__(self, bus: Bus, subjects: Subjects) -> None:
        self._bus = bus
        self._subject = subjects.audit
        self._name = subjects.audit_stream

    async def make(self, bounds: AuditBounds) -> None:
        """Makes it, or gives the one that there is these bounds."""
        form = {
            "name": self._name,
            "subjects": [self._subject],
            "description": "Weir, life events of requests",
            "retention": "limits",
            "discard": "old",
            "storage": "file",
            "num_replicas": 1,
            "max_consumers": -1,
            "max_msgs": -1,
            "max_bytes": bounds.max_bytes,
            "max_age": int(bounds.max_age_s * 1e9),
            "duplicate_window": int(min(_DUPLICATES_S, bounds.max_age_s) * 1e9),
        }
        error = await self._ask("CREATE", form)
        if error.get("err_code") == _NAME_IN_USE:
            error = await self._ask("UPDATE", form)
        _check(error, f"stream {self._name}")

    async def append(self, events: Sequence[LifeEvent], message_id: str) -> None:
        """One message of at most MAX_BATCH events. Sent again under its `message_id`, it is in the stream once."""
        payload = "".join(event.to_line() for event in events).encode()
        headers = {"Nats-Msg-Id": message_id}
        answer = await self._bus.request(self._subject, payload, timeout_s=_TIMEOUT_S, headers=headers)
        _check(_error_of(answer.payload), self._subject)

    async def lines(self) -> AsyncIterator[str]:
        """All that is there, from the oldest batch on, without the ends of lines. Raises BusError where there is no
        stream."""
        sequence = 1
        while True:
            asked = {"seq": sequence, "next_by_subj": self._subject}
            content = await self._request("MSG.GET", asked)
            error = _error_in(content)
            if error.get("err_code") == _NO_MESSAGE:
                return
            if error.get("code") == _STATUS_NOT_FOUND:
                raise BusRefused(f"there is no stream {self._name}: does a gateway run with the setting audit?")
            _check(error, f"stream {self._name}")
            text, sequence = _message_of(content, sequence)
            for line in text.splitlines():
                yield line

    async def _ask(self, verb: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """Its error; empty: none."""
        return _error_in(await self._request(verb, content))

    async def _request(self, verb: str, content: Mapping[str, Any]) -> dict[str, Any]:
        subject = f"{_API}.{verb}.{self._name}"
        try:
            answer = await self._bus.request(subject, json.dumps(content).encode(), timeout_s=_TIMEOUT_S)
        except NoResponder as error:
            raise BusRefused("the NATS server has no JetStream") from error
        return _object_of(answer.payload)


def _object_of(payload: bytes) -> dict[str, Any]:
    try:
        content = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise BusError(f"JetStream answered what is no JSON: {payload[:80]!r}") from error
    if not isinstance(content, dict):
        raise BusError(f"JetStream answered what is no object: {payload[:80]!r}")
    return content


def _error_of(payload: bytes) -> dict[str, Any]:
    return _error_in(_object_of(payload))


def _error_in(content: Mapping[str, Any]) -> dict[str, Any]:
    error = content.get("error", {})
    return error if isinstance(error, dict) else {"description": str(error)[:80]}


def _message_of(content: Mapping[str, Any], sequence: int) -> tuple[str, int]:
    """Its text, and the number from which on the next one is. Raises BusError."""
    try:
        message = content["message"]
        text, found = base64.b64decode(message.get("data", ""), validate=True).decode(), message["seq"]
        if type(found) is not int or found < sequence:
            raise ValueError(f"seq {found!r:.40} is not from {sequence} on")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BusError(f"JetStream answered a message that cannot be read ({error!r:.200})") from error
    return text, found + 1


def _check(error: Mapping[str, Any], what: str) -> None:
    """Raises BusRefused."""
    if error:
        raise BusRefused(f"{what}: {error.get('description', error)}")

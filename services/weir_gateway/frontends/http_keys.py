"""`Idempotency-Key` and `Last-Event-ID` of an HTTP request, and the ids of the events that it is answered with.

An event's id says how many tokens of the answer its client has with it, and `-end` that it has the finish reason too.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from weir.core.errors import FieldViolation, InvalidRequest
from weir_gateway.frontends.openai.schema import HTTP_NAMES
from weir_gateway.requests.client_request import ClientRequest
from weir_gateway.requests.output import OutputDelta

_EVENT_ID = re.compile(r"([0-9]{1,9})(-end)?")
_KEY_HEADER = HTTP_NAMES["idempotency_key"]
_EVENT_HEADER = HTTP_NAMES["resume_from"]


def key_of(headers: Mapping[str, str]) -> str:
    """As it came; empty: none."""
    return headers.get(_KEY_HEADER, "")


def with_key(request: ClientRequest, headers: Mapping[str, str]) -> ClientRequest:
    """Raises InvalidRequest for an event id that no event has, or with a whole answer, which has no events."""
    key, event_id = headers.get(_KEY_HEADER), headers.get(_EVENT_HEADER)
    if key is None and event_id is None:
        return request
    if key == "":
        raise InvalidRequest([FieldViolation(_KEY_HEADER, "is empty; leave it out, or give 1 to 255 characters")])
    options = replace(request.options, idempotency_key=key or "")
    if event_id is None:
        return replace(request, options=options)
    if not request.is_stream:
        raise InvalidRequest([FieldViolation(_EVENT_HEADER, "is for streams; leave it out, or say stream: true")])
    match = _EVENT_ID.fullmatch(event_id)
    if match is None:
        raise InvalidRequest(
            [FieldViolation(_EVENT_HEADER, f"is {event_id[:40]!r}; give the id of an event as it came")]
        )
    options = replace(options, resume_from=int(match[1]))
    return replace(request, options=options, had_end=match[2] is not None)


def event_id_of(delta: OutputDelta) -> str:
    """Of the event that carries it."""
    num_tokens = delta.first_index + len(delta.token_ids)
    return f"{num_tokens}-end" if delta.finish_reason is not None else str(num_tokens)

"""`X-Request-Id`: the name by which a client, a proxy and the gateway speak of one HTTP request.

It correlates what they say, and nothing else: two requests with one id are two requests.
"""

import re
import uuid

from starlette.datastructures import Headers
from starlette.responses import Response

from weir.core.errors import FieldViolation, InvalidRequest
from weir_gateway.frontends.openai_schema import HTTP_NAMES

MAX_CORRELATION_ID_CHARS = 128
CORRELATION_HEADER = HTTP_NAMES["request_id"]
_CORRELATION_ID = re.compile(rf"[\x21-\x7e]{{1,{MAX_CORRELATION_ID_CHARS}}}")
_ADVICE = f"send 1 to {MAX_CORRELATION_ID_CHARS} visible characters of ASCII, without spaces, or leave it out"


def correlation_id_of(headers: Headers) -> str:
    """The client's own, or a new one where it sent none, or none that may be taken over."""
    given = headers.getlist(CORRELATION_HEADER)
    return given[0] if len(given) == 1 and _CORRELATION_ID.fullmatch(given[0]) else uuid.uuid4().hex


def check_correlation_id(headers: Headers) -> None:
    """Raises InvalidRequest for one that may not be taken over."""
    given = headers.getlist(CORRELATION_HEADER)
    if len(given) > 1:
        raise InvalidRequest([FieldViolation(CORRELATION_HEADER, f"comes {len(given)} times; send it once")])
    if given and not _CORRELATION_ID.fullmatch(given[0]):
        num_chars = len(given[0])
        raise InvalidRequest(
            [FieldViolation(CORRELATION_HEADER, f"is {given[0][:40]!r}, {num_chars} characters; {_ADVICE}")]
        )


def mark(response: Response, correlation_id: str) -> None:
    """The answer says whose it is."""
    response.headers[CORRELATION_HEADER] = correlation_id

"""`X-Request-Id`: the name by which a client, a proxy and the gateway speak of one HTTP request.

It correlates what they say, and nothing else: two requests with one id are two requests.
"""

import re
import uuid
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.responses import Response

from weir.core.errors import FieldViolation, InvalidRequest
from weir_gateway.frontends.openai.schema import HTTP_NAMES

MAX_CORRELATION_ID_CHARS = 128
CORRELATION_HEADER = HTTP_NAMES["request_id"]
_CORRELATION_ID = re.compile(rf"[\x21-\x7e]{{1,{MAX_CORRELATION_ID_CHARS}}}")
_ADVICE = f"send 1 to {MAX_CORRELATION_ID_CHARS} visible characters of ASCII, without spaces, or leave it out"


class Correlation(NamedTuple):
    """What one request is called."""

    correlation_id: str
    """The client's own, or a new one where it sent none, or none that may be taken over."""
    problem: str = ""
    """Why the client's may not be taken over; empty: it may, or there is none."""

    def check(self) -> None:
        """Raises InvalidRequest for one that may not be taken over."""
        if self.problem:
            raise InvalidRequest([FieldViolation(CORRELATION_HEADER, self.problem)])


def correlation_of(headers: Headers) -> Correlation:
    given = headers.getlist(CORRELATION_HEADER)
    if len(given) == 1 and _CORRELATION_ID.fullmatch(given[0]):
        return Correlation(given[0])
    made = uuid.uuid4().hex
    if not given:
        return Correlation(made)
    if len(given) > 1:
        return Correlation(made, f"comes {len(given)} times; send it once")
    return Correlation(made, f"is {given[0][:40]!r}, {len(given[0])} characters; {_ADVICE}")


def mark(response: Response, correlation_id: str) -> None:
    """The answer says whose it is."""
    response.headers[CORRELATION_HEADER] = correlation_id

"""Errors as the clients of each API of the HTTP port read them: their bodies, statuses and headers."""

from typing import Protocol

from starlette.responses import JSONResponse, Response

from weir.core.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    PermissionDenied,
    QuotaExceeded,
    Unauthenticated,
    Unavailable,
    WeirError,
)
from weir_gateway.frontends.openai.render import Json, error_body, error_headers, error_status

MESSAGES_PATH = "/v1/messages"
ANTHROPIC_ID_HEADER = "request-id"
"""Anthropic's name for what `X-Request-Id` is to others."""

_MAX_MESSAGE_CHARS = 2000

# error -> HTTP status, `type`
_ANTHROPIC_ERRORS: tuple[tuple[type[WeirError], int, str], ...] = (
    (InvalidRequest, 400, "invalid_request_error"),
    (Unauthenticated, 401, "authentication_error"),
    (PermissionDenied, 403, "permission_error"),
    (NotFound, 404, "not_found_error"),
    (AlreadyExists, 409, "conflict_error"),
    (QuotaExceeded, 429, "rate_limit_error"),
    (Overloaded, 529, "overloaded_error"),
    (Cancelled, 499, "api_error"),
    (Unavailable, 503, "api_error"),
    (DeadlineExceeded, 504, "timeout_error"),
    (WeirError, 500, "api_error"),
)
_ANTHROPIC_KINDS = {404: "not_found_error", 413: "request_too_large"}


class ErrorForm(Protocol):
    """How one API answers what it does not serve. `correlation_id` is the request's."""

    def of_error(self, error: WeirError, correlation_id: str) -> Response: ...

    def of_status(self, status: int, message: str, correlation_id: str) -> Response:
        """Of what is wrong with a request before it has become one: no such path, a body that cannot be read."""
        ...


class OpenAiErrors:
    """OpenAI's nested form, with the wrong field in `param`."""

    def of_error(self, error: WeirError, correlation_id: str) -> Response:
        del correlation_id
        return JSONResponse(error_body(error), error_status(error), headers=error_headers(error))

    def of_status(self, status: int, message: str, correlation_id: str) -> Response:
        del correlation_id
        kind = "not_found_error" if status == 404 else "invalid_request_error"
        return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": None}}, status)


class AnthropicErrors:
    """Anthropic's form, whose message alone names the wrong field."""

    def of_error(self, error: WeirError, correlation_id: str) -> Response:
        body = anthropic_error_body(error, correlation_id)
        return self._answer(body, _anthropic_entry_of(error)[1], correlation_id, error_headers(error))

    def of_status(self, status: int, message: str, correlation_id: str) -> Response:
        kind = _ANTHROPIC_KINDS.get(status, "invalid_request_error")
        return self._answer(_anthropic_body(kind, message, correlation_id), status, correlation_id, {})

    def _answer(self, body: Json, status: int, correlation_id: str, headers: dict[str, str]) -> Response:
        return JSONResponse(body, status, headers={**headers, ANTHROPIC_ID_HEADER: correlation_id})


_OPENAI = OpenAiErrors()
_ANTHROPIC = AnthropicErrors()


def error_form_of(path: str) -> ErrorForm:
    """Of what is asked for at `path`: OpenAI's, but for the paths that are Anthropic's."""
    return _ANTHROPIC if path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/") else _OPENAI


def anthropic_error_body(error: WeirError, correlation_id: str) -> Json:
    """Also of the event that ends a stream which fails."""
    return _anthropic_body(_anthropic_entry_of(error)[2], error.message, correlation_id)


def _anthropic_body(kind: str, message: str, correlation_id: str) -> Json:
    error = {"type": kind, "message": message[:_MAX_MESSAGE_CHARS]}
    return {"type": "error", "error": error, "request_id": correlation_id}


def _anthropic_entry_of(error: WeirError) -> tuple[type[WeirError], int, str]:
    return next(entry for entry in _ANTHROPIC_ERRORS if isinstance(error, entry[0]))

"""`core.errors` as gRPC statuses with google.rpc details, and back on the client's side."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2

from weir.core.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    FieldViolation,
    InternalError,
    InvalidRequest,
    NotFound,
    Overloaded,
    PermissionDenied,
    QuotaExceeded,
    Unauthenticated,
    Unavailable,
    WeirError,
)

_DETAILS_KEY: Final = "grpc-status-details-bin"
_NOT_REACHED: Final = ("failed to connect", "DNS resolution failed")
"""How gRPC's own words begin where there is no server."""

# Trailers beyond 8 KiB are cut off by clients, and the whole status is lost with them.
_MAX_MESSAGE_CHARS: Final = 1000
_MAX_DESCRIPTION_CHARS: Final = 200
_MAX_VIOLATIONS: Final = 16
_TENANT_SUBJECT: Final = "tenant:"

_CODES: Final[tuple[tuple[type[WeirError], grpc.StatusCode], ...]] = (
    (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (PermissionDenied, grpc.StatusCode.PERMISSION_DENIED),
    (NotFound, grpc.StatusCode.NOT_FOUND),
    (AlreadyExists, grpc.StatusCode.ALREADY_EXISTS),
    (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (Unavailable, grpc.StatusCode.UNAVAILABLE),
    (DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (Cancelled, grpc.StatusCode.CANCELLED),
    (WeirError, grpc.StatusCode.INTERNAL),
)
_BY_CODE: Final[dict[grpc.StatusCode, type[WeirError]]] = {
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
}


def status_code(error: WeirError) -> grpc.StatusCode:
    """The gRPC code of the table in `core.errors`."""
    return next(code for kind, code in _CODES if isinstance(error, kind))


def status_trailers(error: WeirError) -> tuple[tuple[str, bytes], ...]:
    """The trailing metadata that carries the google.rpc.Status of `error`: its fields, quota and retry hint."""
    status = status_pb2.Status(
        code=code_pb2.Code.Value(status_code(error).name),
        message=_cut(error.message, _MAX_MESSAGE_CHARS),
        details=[_packed(detail) for detail in _details(error)],
    )
    return ((_DETAILS_KEY, status.SerializeToString()),)


async def abort_with(context: "grpc.aio.ServicerContext[Any, Any]", error: WeirError) -> NoReturn:
    """Ends the call with the status of `error`. Raises what grpc.aio raises to leave a handler."""
    await context.abort(
        status_code(error), _cut(error.message, _MAX_MESSAGE_CHARS), trailing_metadata=status_trailers(error)
    )
    raise AssertionError("grpc.aio's abort() returned")


def from_rpc_error(error: grpc.RpcError) -> WeirError:
    """The error that a server raised. A status without details (from the transport, say) keeps its code's meaning."""
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return Unavailable(f"the call failed before it began: {error}")
    code = error.code()
    message = error.details() or code.name
    trailers = error.trailing_metadata() or ()
    details = _read_details(trailers)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and all(key != _DETAILS_KEY for key, _ in trailers):
        message = "the deadline has passed before the whole answer was there"  # by this side's own clock
    if code is grpc.StatusCode.UNAVAILABLE and message.startswith(_NOT_REACHED):
        message = f"{message}; see whether a stack runs there, with `weir status`"
    match code:
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidRequest(details.violations or [FieldViolation("request", message)])
        case grpc.StatusCode.NOT_FOUND | grpc.StatusCode.ALREADY_EXISTS:
            kind = NotFound if code is grpc.StatusCode.NOT_FOUND else AlreadyExists
            return kind(details.violations[0].field if details.violations else "", message)
        case grpc.StatusCode.RESOURCE_EXHAUSTED if details.tenant is not None:
            return QuotaExceeded(message, retry_after_s=details.retry_after_s, tenant=details.tenant)
        case _ if code in _BY_CODE:
            return _BY_CODE[code](message, retry_after_s=details.retry_after_s)
        case _:
            return InternalError(message if code is grpc.StatusCode.INTERNAL else f"{code.name}: {message}")


def _details(error: WeirError) -> list[Any]:
    details: list[Any] = []
    if isinstance(error, InvalidRequest):
        details.append(_bad_request(error.violations[:_MAX_VIOLATIONS]))
    if isinstance(error, NotFound | AlreadyExists):
        details.append(_bad_request([FieldViolation(error.field, error.message)]))
    if isinstance(error, QuotaExceeded):
        violation = error_details_pb2.QuotaFailure.Violation(
            subject=f"{_TENANT_SUBJECT}{error.tenant}", description=_cut(error.message, _MAX_DESCRIPTION_CHARS)
        )
        details.append(error_details_pb2.QuotaFailure(violations=[violation]))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return details


def _bad_request(violations: Iterable[FieldViolation]) -> Any:
    return error_details_pb2.BadRequest(
        field_violations=[
            error_details_pb2.BadRequest.FieldViolation(
                field=_cut(violation.field, _MAX_DESCRIPTION_CHARS),
                description=_cut(violation.description, _MAX_DESCRIPTION_CHARS),
            )
            for violation in violations
        ]
    )


def _packed(detail: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


@dataclass(slots=True)
class _Details:
    """The details of a status. `tenant` is None where no tenant's quota is exceeded."""

    violations: list[FieldViolation] = field(default_factory=list)
    retry_after_s: float | None = None
    tenant: str | None = None


def _read_details(metadata: Iterable[tuple[str, str | bytes]]) -> _Details:
    raw = next((value for key, value in metadata if key == _DETAILS_KEY), b"")
    found = _Details()
    bad_request, retry_info = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    quota = error_details_pb2.QuotaFailure()
    try:
        for detail in status_pb2.Status.FromString(raw).details:
            if detail.Unpack(bad_request):
                found.violations += [FieldViolation(v.field, v.description) for v in bad_request.field_violations]
            elif detail.Unpack(retry_info):
                found.retry_after_s = retry_info.retry_delay.ToMilliseconds() / 1000
            elif detail.Unpack(quota) and quota.violations:
                found.tenant = quota.violations[0].subject.removeprefix(_TENANT_SUBJECT)
    except DecodeError:  # the details are a help; the code and the message stand without them
        return _Details()
    return found


def _cut(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"

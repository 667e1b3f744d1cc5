"""Errors that reach a user.

WeirError
├── InvalidRequest      a field is wrong; names it                        INVALID_ARGUMENT    400
├── Unauthenticated     no API key, or one that nobody has                UNAUTHENTICATED     401
├── PermissionDenied    the key's tenant may not do that                  PERMISSION_DENIED   403
├── NotFound            no such model                                     NOT_FOUND           404
├── AlreadyExists       the name stands for something else already        ALREADY_EXISTS      409
├── Overloaded          a bound is reached; says when to try again        RESOURCE_EXHAUSTED  429
│   └── QuotaExceeded   a bound of one tenant; names the tenant           RESOURCE_EXHAUSTED  429
├── Unavailable         no worker, or it was lost; says when to try again UNAVAILABLE         503
├── DeadlineExceeded    the client's deadline or a bound on waiting       DEADLINE_EXCEEDED   504
├── Cancelled           the client cancelled                              CANCELLED           499
└── InternalError       a defect of Weir                                  INTERNAL            500

The gRPC status and the HTTP status of each live at the edges (`weir.rpc.errors`, the gateway's HTTP frontend).
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One wrong field: its path in the request, and what is wrong with its value, the limit included."""

    field: str
    description: str


class WeirError(Exception):
    """An error with a message for the user and, where trying again makes sense, when."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class InvalidRequest(WeirError):
    """Carries every violation found, not only the first."""

    def __init__(self, violations: Sequence[FieldViolation]) -> None:
        super().__init__("; ".join(f"{v.field}: {v.description}" for v in violations))
        self.violations = tuple(violations)


class Unauthenticated(WeirError):
    """Who asks is not known. Never says more of a key than that it is not known."""


class PermissionDenied(WeirError):
    """Who asks is known, and may not have this."""


class NotFound(WeirError):
    """No such thing; `field` names where the request asked for it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class AlreadyExists(WeirError):
    """What the client names is there, and is not what it asks for; `field` names where the request named it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class Overloaded(WeirError):
    """A bound is reached. Always has `retry_after_s`."""


class QuotaExceeded(Overloaded):
    """A bound of one tenant is reached; others are served meanwhile. `tenant` and `bound`, the key of the limits file
    that is reached, may be empty where they are not known."""

    def __init__(self, message: str, *, retry_after_s: float | None = None, tenant: str = "", bound: str = "") -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.tenant = tenant
        self.bound = bound


class Unavailable(WeirError):
    """Nobody can serve this now, or whoever did is lost."""


class DeadlineExceeded(WeirError):
    """Waited as long as was allowed."""


class Cancelled(WeirError):
    """The client asked for it, or went away."""


class InternalError(WeirError):
    """A defect of Weir."""


def told_to_others(error: BaseException) -> str:
    """For logs, spans and operators: the message, unless it may repeat what a client sent; then the kind alone."""
    may_repeat = (InvalidRequest, NotFound, AlreadyExists, PermissionDenied, Unauthenticated)
    is_told = isinstance(error, WeirError) and not isinstance(error, may_repeat)
    return str(error) if is_told else type(error).__name__

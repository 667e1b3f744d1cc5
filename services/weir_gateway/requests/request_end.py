"""How a request ends, and what its client or its driver is told of why."""

from dataclasses import dataclass

from weir.core.errors import DeadlineExceeded, InternalError, Overloaded, Unavailable, WeirError
from weir.core.life import FinishReason, Phase
from weir.wire.v1 import worker_pb2

RETRY_AFTER_S = 1.0

_INTERNAL_REASONS = (
    worker_pb2.WORKER_ERROR_REASON_UNSPECIFIED,
    worker_pb2.WORKER_ERROR_REASON_STALE_ATTEMPT,
    worker_pb2.WORKER_ERROR_REASON_INTERNAL,
)


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """How a request ended. `error` is None for FINISHED alone, and then `finish_reason` is set."""

    phase: Phase
    error: WeirError | None = None
    finish_reason: FinishReason | None = None


def shutting_down() -> Unavailable:
    return Unavailable("the gateway is shutting down", retry_after_s=RETRY_AFTER_S)


def given_up_by(worker_id: str, error: worker_pb2.WorkerError) -> WeirError:
    """InternalError for a defect; after all else other workers may go on."""
    message = f"worker {worker_id} gave the request up: {error.message or 'no reason given'}"
    if error.reason == worker_pb2.WORKER_ERROR_REASON_NO_CAPACITY:
        return Overloaded(message, retry_after_s=RETRY_AFTER_S)
    if error.reason in _INTERNAL_REASONS:
        return InternalError(message)
    return Unavailable(message, retry_after_s=RETRY_AFTER_S)


def after_tokens(error: WeirError, num_tokens: int) -> WeirError:
    """With the number that was sent: whether to try again is for the client to decide, which would see them twice."""
    if num_tokens == 0:
        return error
    counted = f"{error.message}; {num_tokens} tokens were sent before"
    return type(error)(counted) if isinstance(error, DeadlineExceeded | InternalError) else Unavailable(counted)

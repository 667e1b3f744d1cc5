"""Attempts, endings and commands as `weir.v1.Worker` has them."""

from weir.core.attempt import Attempt
from weir.core.life import FinishReason
from weir.rpc.conversions import attempt_to_pb, finish_reason_from_pb
from weir.wire.v1 import types_pb2, worker_pb2


def output_end_from_pb(value: types_pb2.FinishReason.ValueType) -> FinishReason | None:
    """None for what is no end of an output: not ended, and cancelled."""
    reason = finish_reason_from_pb(value)
    return None if reason is FinishReason.CANCELLED else reason


def resume_command(request_id: str, attempt: Attempt, next_index: int) -> worker_pb2.ServeRequest:
    resume = worker_pb2.Resume(request_id=request_id, attempt=attempt_to_pb(attempt), next_index=next_index)
    return worker_pb2.ServeRequest(resume=resume)


def cancel_command(request_id: str, attempt: Attempt) -> worker_pb2.ServeRequest:
    cancel = worker_pb2.Cancel(request_id=request_id, attempt=attempt_to_pb(attempt))
    return worker_pb2.ServeRequest(cancel=cancel)

"""Between the gateway's words and `weir.v1.Worker`'s messages."""

from weir.bus.messages import Placement
from weir.core.attempt import Attempt
from weir.core.life import FinishReason
from weir.rpc.conversions import (
    all_logprobs_from_pb,
    attempt_from_pb,
    attempt_to_pb,
    finish_reason_from_pb,
    sampling_to_pb,
    scheduling_to_pb,
)
from weir.wire.v1 import types_pb2, worker_pb2
from weir_gateway.requests.output import TokenUpdate
from weir_gateway.requests.validation import CheckedRequest


def output_end_from_pb(value: types_pb2.FinishReason.ValueType) -> FinishReason | None:
    """None for what is no end of an answer: not ended, and cancelled."""
    reason = finish_reason_from_pb(value)
    return None if reason is FinishReason.CANCELLED else reason


def update_from_pb(update: worker_pb2.SequenceUpdate) -> TokenUpdate:
    return TokenUpdate(
        attempt=attempt_from_pb(update.attempt),
        first_index=update.first_index,
        token_ids=update.token_ids,
        finish_reason=output_end_from_pb(update.finish_reason),
        logprobs=all_logprobs_from_pb(update.logprobs),
        prompt_logprobs=all_logprobs_from_pb(update.prompt_logprobs),
        first_prompt_index=update.first_prompt_index,
    )


def start_command(
    request_id: str, checked: CheckedRequest, placement: Placement, traceparent: str
) -> worker_pb2.ServeRequest:
    """Everything that the prefill worker needs."""
    start = worker_pb2.Start(
        request_id=request_id,
        attempt=types_pb2.Attempt(dispatch=placement.dispatch),
        prompt_token_ids=checked.prompt_token_ids,
        sampling=sampling_to_pb(checked.sampling),
        max_tokens=checked.stop_rules.max_tokens,
        min_tokens=checked.stop_rules.min_tokens,
        stop_token_ids=checked.stop_rules.stop_token_ids,
        decode_worker_id=placement.decode_worker_id,
        traceparent=traceparent,
        num_reserved_pages=placement.num_reserved_pages,
        scheduling=scheduling_to_pb(placement.scheduling),
        cache_salt=checked.scope.cache_salt,
        skips_prefix_cache=checked.draft.options.skips_prefix_cache,
    )
    return worker_pb2.ServeRequest(start=start)


def resume_command(request_id: str, attempt: Attempt, next_index: int) -> worker_pb2.ServeRequest:
    resume = worker_pb2.Resume(request_id=request_id, attempt=attempt_to_pb(attempt), next_index=next_index)
    return worker_pb2.ServeRequest(resume=resume)


def cancel_command(request_id: str, attempt: Attempt) -> worker_pb2.ServeRequest:
    cancel = worker_pb2.Cancel(request_id=request_id, attempt=attempt_to_pb(attempt))
    return worker_pb2.ServeRequest(cancel=cancel)

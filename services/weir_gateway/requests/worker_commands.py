"""What workers are asked for a request, as sent."""

from collections.abc import Sequence
from dataclasses import replace

from weir.bus.messages import Placement
from weir.core.life import Attempt
from weir.rpc.conversions import attempt_to_pb, sampling_to_pb, scheduling_to_pb
from weir.wire.v1 import types_pb2, worker_pb2
from weir_gateway.requests.validation import CheckedRequest


def start_command(
    request_id: str,
    checked: CheckedRequest,
    placement: Placement,
    output_token_ids: Sequence[int],
    traceparent: str,
    keep_ms: int,
) -> worker_pb2.ServeRequest:
    """For the prefill worker: `output_token_ids` were sampled under earlier dispatches."""
    sampling = checked.sampling
    if output_token_ids:  # the log-probabilities of the prompt came before the first token
        sampling = replace(sampling, prompt_logprobs=None)
    start = worker_pb2.Start(
        request_id=request_id,
        attempt=types_pb2.Attempt(dispatch=placement.dispatch),
        prompt_token_ids=checked.prompt_token_ids,
        sampling=sampling_to_pb(sampling),
        max_tokens=checked.stop_rules.max_tokens,
        min_tokens=checked.stop_rules.min_tokens,
        stop_token_ids=checked.stop_rules.stop_token_ids,
        decode_worker_id=placement.decode_worker_id,
        traceparent=traceparent,
        num_reserved_pages=placement.num_reserved_pages,
        scheduling=scheduling_to_pb(placement.scheduling),
        cache_salt=checked.scope.cache_salt,
        skips_prefix_cache=checked.client_request.options.skips_prefix_cache,
        output_token_ids=output_token_ids,
        keep_ms=keep_ms,
        prefix_source=placement.prefix_source,
        prefix_is_expected=bool(placement.prefix_worker_id),
    )
    return worker_pb2.ServeRequest(start=start)


def resume_command(
    request_id: str,
    attempt: Attempt,
    next_index: int,
    *,
    awaits_hand_off: bool,
    claims: bool,
    is_search: bool,
) -> worker_pb2.ServeRequest:
    """For a worker that has the sequence, or is to get it: the updates from `next_index` on. `is_search`: it is one of
    several that may get it."""
    resume = worker_pb2.Resume(
        request_id=request_id,
        attempt=attempt_to_pb(attempt),
        next_index=next_index,
        awaits_hand_off=awaits_hand_off,
        claims=claims,
        is_search=is_search,
    )
    return worker_pb2.ServeRequest(resume=resume)

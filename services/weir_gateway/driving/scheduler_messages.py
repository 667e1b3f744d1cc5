"""Requests as the scheduler's messages have them, and its refusals as errors for the client."""

import asyncio

from weir.bus.messages import SCHEDULER_HASH_BYTES, HeldRequest, RefusalReason, Submit
from weir.core.errors import (
    FieldViolation,
    InvalidRequest,
    NotFound,
    Overloaded,
    PermissionDenied,
    QuotaExceeded,
    Unavailable,
    WeirError,
)
from weir.kv.geometry import PAGE_TOKENS
from weir.kv.prefixes.hashing import page_hashes, prefix_seed
from weir_gateway.requests.client_request import ClientRequest
from weir_gateway.requests.request_state import RequestState
from weir_gateway.requests.validation import CheckedRequest, prompt_field

_MAX_PAGES = 4096
"""32 kB in a prompt's message. What is cached of a longer one is more than the scheduler knows."""
_MAX_TOKENS_AT_ONCE = 8192  # about half a millisecond
_MIN_RETRY_AFTER_S = 1.0
_OVERLOADS = frozenset(
    {RefusalReason.QUEUE_FULL, RefusalReason.WAITED_TOO_LONG, RefusalReason.SHED, RefusalReason.DEADLINE}
)


def submit_message(state: RequestState, gateway_id: str, now_s: float, page_hashes: bytes = b"") -> Submit:
    """The deadline counts from `now_s`."""
    checked, left_ms = state.checked, 0
    if state.deadline_at_s is not None:
        left_ms = max(1, round((state.deadline_at_s - now_s) * 1000))
    options = checked.client_request.options
    return Submit(
        request_id=state.request_id,
        gateway_id=gateway_id,
        model=checked.model.name,
        lane=checked.scope.lane,
        tenant=checked.scope.tenant,
        num_prompt_tokens=len(checked.prompt_token_ids),
        max_tokens=checked.stop_rules.max_tokens,
        deadline_ms=left_ms,
        ttft_target_ms=options.ttft_target_ms or 0,
        itl_target_ms=options.itl_target_ms or 0,
        expected_output_tokens=options.expected_output_tokens or 0,
        predicted_output_tokens=checked.prediction.num_tokens,
        output_score=checked.prediction.score,
        page_hashes=page_hashes,
        dispatch=state.dispatch,
    )


def held_message(state: RequestState, gateway_id: str, now_s: float) -> HeldRequest:
    submit = submit_message(state, gateway_id, now_s)
    return HeldRequest(submit, state.placement, state.prefilled.done(), state.output.num_tokens)


async def prompt_page_hashes(checked: CheckedRequest) -> bytes:
    """SCHEDULER_HASH_BYTES of each full page, so that the scheduler can place the prompt where its beginning is cached;
    none of a prompt that takes nothing from the cache. There is no text in them."""
    options, model = checked.client_request.options, checked.model
    if not model.digest or options.skips_prefix_cache or checked.sampling.prompt_logprobs is not None:
        return b""
    seed = prefix_seed(model.digest, salt=checked.scope.cache_salt)
    token_ids = checked.prompt_token_ids[: _MAX_PAGES * PAGE_TOKENS]
    if len(token_ids) <= _MAX_TOKENS_AT_ONCE:
        hashes = page_hashes(token_ids, seed)
    else:
        hashes = await asyncio.to_thread(page_hashes, token_ids, seed)
    return b"".join(page_hash[:SCHEDULER_HASH_BYTES] for page_hash in hashes)


def refusal_error(
    checked: CheckedRequest, reason: RefusalReason | None, message: str, retry_after_ms: int
) -> WeirError:
    """For the client; fields by the names that it used."""
    retry_after_s = retry_after_ms / 1000 or _MIN_RETRY_AFTER_S
    if reason is RefusalReason.QUOTA:
        return QuotaExceeded(message, retry_after_s=retry_after_s, tenant=checked.scope.tenant)
    if reason in _OVERLOADS:
        return Overloaded(message, retry_after_s=retry_after_s)
    field = _field_of(checked.client_request, reason)
    if field is None:
        return Unavailable(message or "the scheduler refused the request", retry_after_s=retry_after_s)
    if reason is RefusalReason.UNKNOWN_MODEL:
        return NotFound(field, f"{field}: {message}")
    if reason is RefusalReason.LANE_FORBIDDEN:
        return PermissionDenied(f"{field}: {message}")
    return InvalidRequest([FieldViolation(field, message)])


def _field_of(client_request: ClientRequest, reason: RefusalReason | None) -> str | None:
    """What the client calls the field that is wrong; None: no field is."""
    match reason:
        case RefusalReason.UNKNOWN_MODEL:
            return client_request.names["model"]
        case RefusalReason.UNKNOWN_LANE | RefusalReason.LANE_FORBIDDEN:
            return client_request.names["lane"]
        case RefusalReason.TOO_LARGE:
            return prompt_field(client_request)
        case _:
            return None

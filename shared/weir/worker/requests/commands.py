"""Commands of gateways: every field is checked here.

A message that no sane gateway sends ends its stream (InvalidRequest); a prompt that cannot be served is refused alone.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from weir.core.errors import FieldViolation, InvalidRequest
from weir.core.sampling import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, StopRules
from weir.engine.messages import Arrival, SequenceKey
from weir.kv.geometry import num_pages_for
from weir.kv.prefixes import prefix_seed
from weir.kv.records.record import SequenceParams
from weir.rpc.conversions import attempt_from_pb, sampling_from_pb, sampling_problems, scheduling_from_pb
from weir.wire.v1 import worker_pb2
from weir.worker.engine.model_loading import ModelSpec
from weir.worker.requests.request_tables import Resume

_Named = worker_pb2.Start | worker_pb2.Cancel | worker_pb2.Resume | worker_pb2.Stage
_REQUEST_ID = re.compile(r"[0-9a-f]{32}")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MAX_ADDRESS_CHARS = 300
_MAX_KEEP_MS = 3_600_000
_MAX_NEXT_INDEX = 2**31 - 1
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def gateway_id_from_pb(hello: worker_pb2.Hello) -> str:
    """Raises InvalidRequest."""
    if not _NAME.fullmatch(hello.gateway_id):
        raise _invalid("hello.gateway_id", "must be 1 to 64 characters of A-Z a-z 0-9 _ -")
    return hello.gateway_id


def key_from_pb(command: str, message: _Named) -> SequenceKey:
    """Raises InvalidRequest; `command` is the name of the field that holds `message`."""
    if not _REQUEST_ID.fullmatch(message.request_id):
        raise _invalid(f"{command}.request_id", f"{message.request_id[:64]!r} is not 32 lower-case hex digits")
    if message.attempt.dispatch < 1:
        raise _invalid(f"{command}.attempt.dispatch", "must be at least 1")
    return SequenceKey(message.request_id, attempt_from_pb(message.attempt))


def resume_from_pb(resume: worker_pb2.Resume) -> Resume:
    """Raises InvalidRequest."""
    key = key_from_pb("resume", resume)
    if resume.next_index > _MAX_NEXT_INDEX:
        raise _invalid("resume.next_index", f"must be at most {_MAX_NEXT_INDEX}")
    return Resume(key, resume.next_index, resume.awaits_hand_off, resume.claims, resume.is_search)


def pages_address_from_pb(stage: worker_pb2.Stage) -> str:
    """Raises InvalidRequest."""
    num_chars = len(stage.pages_address)
    if not 1 <= num_chars <= _MAX_ADDRESS_CHARS:
        raise _invalid("stage.pages_address", f"{num_chars} characters: allowed are 1 to {_MAX_ADDRESS_CHARS}")
    return stage.pages_address


def start_from_pb(start: worker_pb2.Start, gateway_id: str, model: ModelSpec) -> Arrival:
    """Raises InvalidRequest with every field that is wrong. The key has been checked with `key_from_pb`."""
    violations = [FieldViolation(f"start.{field}", problem) for field, problem in _problems(start, model)]
    if violations:
        raise InvalidRequest(violations)
    sampling = sampling_from_pb(start.sampling)
    # Positions that are found in the cache have no logits to score.
    is_cacheable = not start.skips_prefix_cache and sampling.prompt_logprobs is None
    params = SequenceParams(
        request_id=start.request_id,
        attempt=attempt_from_pb(start.attempt),
        gateway_id=gateway_id,
        prompt_token_ids=tuple(start.prompt_token_ids),
        # a greater top_k keeps every token too
        sampling=replace(sampling, top_k=min(sampling.top_k, model.vocab_size)),
        stop=StopRules(start.max_tokens, tuple(start.stop_token_ids), start.min_tokens),
        num_reserved_pages=start.num_reserved_pages,
        # A trace that cannot be joined is no reason to refuse a prompt.
        traceparent=start.traceparent if _TRACEPARENT.fullmatch(start.traceparent) else "",
        scheduling=scheduling_from_pb(start.scheduling),
        prefix_seed=prefix_seed(model.digest, salt=start.cache_salt) if is_cacheable else b"",
        decode_worker_id=start.decode_worker_id,
        keep_ms=start.keep_ms,
    )
    return Arrival(
        params,
        output_token_ids=tuple(start.output_token_ids),
        prefix_source=start.prefix_source,
        prefix_is_expected=start.prefix_is_expected,
    )


def _problems(start: worker_pb2.Start, model: ModelSpec) -> list[tuple[str, str]]:
    """(field, what is wrong with it) of all fields."""
    num_prompt_tokens, num_output_tokens = len(start.prompt_token_ids), len(start.output_token_ids)
    num_tokens = num_prompt_tokens + num_output_tokens
    max_output_tokens = max(0, min(start.max_tokens, model.max_context_tokens - num_prompt_tokens) - 1)
    checks = [
        _range_problem("prompt_token_ids", "tokens", num_prompt_tokens, 1, model.max_context_tokens - 1),
        _range_problem("output_token_ids", "tokens", num_output_tokens, 0, max_output_tokens),
        _range_problem("max_tokens", "", start.max_tokens, 1, model.max_context_tokens),
        _range_problem("min_tokens", "", start.min_tokens, 0, model.max_context_tokens),
        _range_problem("stop_token_ids", "ids", len(start.stop_token_ids), 0, MAX_STOP_TOKEN_IDS),
        _range_problem("num_reserved_pages", "", start.num_reserved_pages, num_pages_for(num_tokens), 2**31 - 1),
        _range_problem("keep_ms", "", start.keep_ms, 0, _MAX_KEEP_MS),
        _id_problem("prompt_token_ids", start.prompt_token_ids, model.vocab_size),
        _id_problem("output_token_ids", start.output_token_ids, model.vocab_size),
        _id_problem("stop_token_ids", start.stop_token_ids, model.vocab_size),
        _range_problem("sampling.logit_bias", "ids", len(start.sampling.logit_bias), 0, MAX_LOGIT_BIAS),
        _id_problem("sampling.logit_bias", tuple(start.sampling.logit_bias), model.vocab_size),
    ]
    rank, predicted = start.scheduling.rank, start.scheduling.predicted_output_tokens
    if not math.isfinite(rank):
        checks.append(("scheduling.rank", f"{rank}: must be finite"))
    if not 0 <= predicted < math.inf:
        checks.append(("scheduling.predicted_output_tokens", f"{predicted}: must be finite and at least 0"))
    if not _NAME.fullmatch(start.decode_worker_id):
        checks.append(("decode_worker_id", "must be 1 to 64 characters of A-Z a-z 0-9 _ -"))
    if len(start.prefix_source) > _MAX_ADDRESS_CHARS:
        problem = f"{len(start.prefix_source)} characters: allowed are 0 to {_MAX_ADDRESS_CHARS}"
        checks.append(("prefix_source", problem))
    sampling = [(f"sampling.{name}", problem) for name, problem in sampling_problems(start.sampling)]
    return [check for check in checks if check is not None] + sampling


def _range_problem(field: str, unit: str, value: int, low: int, high: int) -> tuple[str, str] | None:
    if low <= value <= high:
        return None
    return field, f"{value} {unit}".strip() + f": allowed are {low} to {high}"


def _id_problem(field: str, token_ids: Sequence[int], vocab_size: int) -> tuple[str, str] | None:
    if not token_ids or max(token_ids) < vocab_size:
        return None
    index = next(index for index, token_id in enumerate(token_ids) if token_id >= vocab_size)
    return f"{field}[{index}]", f"{token_ids[index]} is not below the vocabulary's {vocab_size}"


def _invalid(field: str, description: str) -> InvalidRequest:
    return InvalidRequest([FieldViolation(field, description)])

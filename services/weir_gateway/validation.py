"""Every check of a request that needs no worker. All violations are collected, each under the name the user wrote.

Two steps around tokenizing: `check_fields` is cheap, whatever was sent; `check_prompt` knows the prompt's length.
"""

import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weir.core.errors import FieldViolation, InvalidRequest
from weir.core.sampling import SamplingParams, StopRules
from weir_gateway.draft import Conversation, FieldNames, RequestDraft, Text, TokenIds
from weir_gateway.models import ServedModel

REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LANE = re.compile(r"[A-Za-z0-9_.-]{0,64}")
_ROLES = ("system", "user", "assistant")
_MAX_TEMPERATURE = 2.0
# The wire carries 32-bit floats: less would arrive as 0.
_MIN_TOP_P = 1e-30
_MAX_SEED = 2**64 - 1
_MAX_STOPS = 16
_MAX_STOP_CHARS = 256
_MAX_STOP_TOKEN_IDS = 16
_MAX_SALT_CHARS = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_prompt_bytes` is far above what any context holds: it only keeps absurd texts from the tokenizer."""

    default_max_tokens: int = 512
    max_prompt_bytes: int = 1 << 20
    max_messages: int = 1024


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request that can be submitted: all defaults filled in."""

    draft: RequestDraft
    model: ServedModel
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop_rules: StopRules


class _Violations:
    """Collects; `raise_any` ends the check."""

    def __init__(self) -> None:
        self._found: list[FieldViolation] = []

    def add(self, field: str, description: str) -> None:
        self._found.append(FieldViolation(field, description))

    def check(self, is_good: bool, field: str, description: str) -> None:
        if not is_good:
            self.add(field, description)

    def raise_any(self) -> None:
        if self._found:
            raise InvalidRequest(self._found)


def check_fields(draft: RequestDraft, model: ServedModel, limits: Limits) -> None:
    """Raises InvalidRequest with every wrong field. Costs little, however large the prompt is."""
    found = _Violations()
    names = draft.names
    _check_prompt_form(found, draft, model, limits)
    _check_names(found, draft)
    _check_sampling(found, draft, names)
    if draft.max_tokens is not None:
        found.check(
            1 <= draft.max_tokens <= model.max_context_tokens,
            names.max_tokens,
            f"is {draft.max_tokens}; must be from 1 to {model.max_context_tokens}, the context of {model.name}",
        )
    _check_stops(found, draft, model)
    found.raise_any()


def check_prompt(
    draft: RequestDraft, model: ServedModel, limits: Limits, prompt_token_ids: Sequence[int]
) -> CheckedRequest:
    """Raises InvalidRequest for a prompt that is empty or leaves no room in the context."""
    found = _Violations()
    num_prompt, context = len(prompt_token_ids), model.max_context_tokens
    field = prompt_field(draft)
    found.check(num_prompt > 0, field, "is empty; give at least one token")
    found.check(
        num_prompt < context,
        field,
        f"is {num_prompt} tokens; {model.name} takes at most {context - 1}, so that one token of output fits",
    )
    found.raise_any()
    wanted = limits.default_max_tokens if draft.max_tokens is None else draft.max_tokens
    eos_ids = () if draft.ignore_eos else model.eos_token_ids
    return CheckedRequest(
        draft=draft,
        model=model,
        prompt_token_ids=tuple(prompt_token_ids),
        sampling=_sampling_of(draft),
        stop_rules=StopRules(
            max_tokens=min(wanted, context - num_prompt),
            stop_token_ids=tuple(dict.fromkeys((*eos_ids, *draft.stop_token_ids))),
        ),
    )


def prompt_field(draft: RequestDraft) -> str:
    """What the client calls the prompt that it sent."""
    match draft.prompt:
        case Text():
            return draft.names.text
        case TokenIds():
            return draft.names.token_ids
        case Conversation():
            return draft.names.messages


def check_text_size(field: str, text: str, limits: Limits) -> None:
    """Raises InvalidRequest for a text that the tokenizer should not even see."""
    found = _Violations()
    _check_bytes(found, field, _num_bytes(text), limits)
    found.raise_any()


def _check_prompt_form(found: _Violations, draft: RequestDraft, model: ServedModel, limits: Limits) -> None:
    names = draft.names
    match draft.prompt:
        case Text(text):
            found.check(text != "", names.text, "is empty; give at least one character")
            _check_bytes(found, names.text, _num_bytes(text), limits)
        case TokenIds(ids):
            found.check(len(ids) > 0, names.token_ids, "is empty; give at least one token id")
            if len(ids) >= model.max_context_tokens:
                limit = f"{model.name} takes at most {model.max_context_tokens - 1}"
                found.add(names.token_ids, f"is {len(ids)} tokens; {limit}, so that one token of output fits")
            else:
                _check_token_ids(found, names.token_ids, ids, model)
        case Conversation(messages):
            _check_messages(found, names, messages, limits)


def _check_messages(
    found: _Violations, names: FieldNames, messages: Sequence[Mapping[str, str]], limits: Limits
) -> None:
    if not 1 <= len(messages) <= limits.max_messages:
        found.add(names.messages, f"has {len(messages)} turns; give from 1 to {limits.max_messages}")
        return
    num_bytes = 0
    for index, message in enumerate(messages):
        role = message["role"]
        expected = f"must be one of {', '.join(_ROLES)}"
        found.check(role in _ROLES, f"{names.messages}[{index}].role", f"is {role[:40]!r}; {expected}")
        num_bytes += _num_bytes(message["content"])
    _check_bytes(found, names.messages, num_bytes, limits)


def _check_names(found: _Violations, draft: RequestDraft) -> None:
    names = draft.names
    if draft.request_id and not REQUEST_ID.fullmatch(draft.request_id):
        found.add(names.request_id, f"is {draft.request_id[:80]!r}; use 1 to 64 characters of A-Z a-z 0-9 _ -")
    if not _LANE.fullmatch(draft.lane):
        found.add(names.lane, f"is {draft.lane[:80]!r}; use at most 64 characters of A-Z a-z 0-9 _ . -")
    if len(draft.cache_salt) > _MAX_SALT_CHARS:
        found.add(names.cache_salt, f"has {len(draft.cache_salt)} characters; at most {_MAX_SALT_CHARS} are allowed")


def _check_sampling(found: _Violations, draft: RequestDraft, names: FieldNames) -> None:
    temperature, top_p, top_k, seed = draft.temperature, draft.top_p, draft.top_k, draft.seed
    if temperature is not None:
        is_good = 0 <= temperature <= _MAX_TEMPERATURE  # not a number is in no range
        found.check(is_good, names.temperature, f"is {temperature}; must be from 0 (greedy) to {_MAX_TEMPERATURE:g}")
    if top_p is not None:
        is_good = _MIN_TOP_P <= top_p <= 1
        found.check(is_good, names.top_p, f"is {top_p}; must be from {_MIN_TOP_P:g} to 1 (all tokens)")
    if top_k is not None:
        found.check(0 <= top_k < 2**31, names.top_k, f"is {top_k}; must be from 0 (all tokens) to {2**31 - 1}")
    if seed is not None:
        found.check(0 <= seed <= _MAX_SEED, names.seed, f"is {seed}; must be from 0 to {_MAX_SEED}")


def _check_stops(found: _Violations, draft: RequestDraft, model: ServedModel) -> None:
    names = draft.names
    found.check(len(draft.stop) <= _MAX_STOPS, names.stop, f"has {len(draft.stop)} strings; at most {_MAX_STOPS}")
    for index, stop in enumerate(draft.stop[:_MAX_STOPS]):
        field = f"{names.stop}[{index}]"
        found.check(1 <= len(stop) <= _MAX_STOP_CHARS, field, f"has {len(stop)} characters; use 1 to {_MAX_STOP_CHARS}")
    num_ids = len(draft.stop_token_ids)
    if num_ids > _MAX_STOP_TOKEN_IDS:
        found.add(names.stop_token_ids, f"has {num_ids} ids; at most {_MAX_STOP_TOKEN_IDS}")
    else:
        _check_token_ids(found, names.stop_token_ids, draft.stop_token_ids, model)


def _check_token_ids(found: _Violations, field: str, ids: Sequence[int], model: ServedModel) -> None:
    wrong = next((index for index, token_id in enumerate(ids) if not 0 <= token_id < model.vocab_size), None)
    if wrong is not None:
        limit = f"must be from 0 to {model.vocab_size - 1}, the vocabulary of {model.name}"
        found.add(field, f"[{wrong}] is {ids[wrong]}; {limit}")


def _check_bytes(found: _Violations, field: str, num_bytes: int, limits: Limits) -> None:
    limit = limits.max_prompt_bytes
    found.check(num_bytes <= limit, field, f"is {num_bytes} bytes; at most {limit} are taken")


def _num_bytes(text: str) -> int:
    # Lone surrogates have no UTF-8; the tokenizer names them, so here they only count.
    return len(text.encode("utf-8", "surrogatepass"))


def _sampling_of(draft: RequestDraft) -> SamplingParams:
    defaults = SamplingParams()
    return SamplingParams(
        temperature=defaults.temperature if draft.temperature is None else draft.temperature,
        top_k=defaults.top_k if draft.top_k is None else draft.top_k,
        top_p=defaults.top_p if draft.top_p is None else draft.top_p,
        seed=_seed_of(draft),
    )


def _seed_of(draft: RequestDraft) -> int:
    """A client that names its request gets the same tokens when it sends the request again."""
    if draft.seed is not None:
        return draft.seed
    if draft.request_id:
        return int.from_bytes(hashlib.blake2b(draft.request_id.encode(), digest_size=8).digest())
    return secrets.randbits(64)

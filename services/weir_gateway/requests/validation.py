"""Every check of a request that needs no worker. All violations are collected, each under the name the user wrote.

Two steps around tokenizing: `check_fields` is cheap, whatever was sent; `check_prompt` knows the prompt's length.
"""

import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weir.bus.keys import seed_of_key
from weir.core.errors import FieldViolation, InvalidRequest
from weir.core.life import FinishReason
from weir.core.options import LOGIT_BIAS_RULE, NUMBER_RULES, GenerateOptions
from weir.core.sampling import MAX_LOGIT_BIAS, SamplingParams, StopRules
from weir_gateway.access import RequestScope
from weir_gateway.caps import CapsInForce
from weir_gateway.requests.cap_checks import find_too_long
from weir_gateway.requests.client_request import ClientRequest, Conversation, FieldNames, Prompt, Text, TokenIds
from weir_gateway.requests.models import ServedModel

IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,255}")
REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LANE = re.compile(r"[A-Za-z0-9_.-]{0,64}")
_ROLES = ("system", "user", "assistant", "tool")
_MAX_STOPS = 16
_MAX_STOP_CHARS = 256
_MAX_STOP_TOKEN_IDS = 32
_MAX_SALT_CHARS = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_prompt_bytes` is far above what any context holds: it only keeps absurd texts from the tokenizer.

    Calls that ask for tokens, or their text, alone: `max_tokenize_calls` at a time, and `max_tokenize_calls_of_tenant`
    of one tenant, each for `tokenize_timeout_s`.

    `prepare_share`: of a core, what long bodies and prompts of one tenant may take while others ask too.
    """

    default_max_tokens: int = 512
    max_prompt_bytes: int = 1 << 20
    max_messages: int = 1024
    max_prompts: int = 256
    """Of one request."""
    max_prompt_logprobs: int = 65_536
    """Log-probabilities of a request's prompts: their tokens times (1 + `prompt_logprobs`)."""
    max_tokenize_calls: int = 8
    max_tokenize_calls_of_tenant: int = 6
    tokenize_timeout_s: float = 30.0
    prepare_share: float = 0.25
    prepare_wait_s: float = 30.0
    """For a turn to be prepared."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Entries of a request's fields that repeat; None where the prompt has another form."""

    messages: int | None
    token_ids: int | None
    stop: int
    stop_token_ids: int
    logit_bias: int


@dataclass(frozen=True, slots=True)
class OutputPrediction:
    """A request's length for the scheduler; the default stands for nothing known."""

    num_tokens: float = 0.0
    score: float | None = None
    """The predictor's rank (higher is shorter)."""
    uncalibrated_tokens: float = 0.0
    """The predictor's number before it was corrected."""


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request that can be submitted: all defaults filled in."""

    client_request: ClientRequest
    model: ServedModel
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop_rules: StopRules
    scope: RequestScope
    prediction: OutputPrediction = OutputPrediction()

    @property
    def log_ids(self) -> Mapping[str, str]:
        """What a line of the log about the request has beside its message."""
        return self.client_request.log_ids

    def try_find_end(self, output_token_ids: Sequence[int]) -> FinishReason | None:
        """Why nothing comes after these; None: there is more to come, or may be."""
        rules = self.stop_rules
        num_tokens = len(self.prompt_token_ids) + len(output_token_ids)
        if output_token_ids and output_token_ids[-1] in rules.stop_token_ids:
            return FinishReason.STOP
        if len(output_token_ids) >= rules.max_tokens or num_tokens >= self.model.max_context_tokens:
            return FinishReason.LENGTH
        return None


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


def check_counts(counts: Counts, names: FieldNames, model: ServedModel, limits: Limits) -> None:
    """Raises InvalidRequest with every field that has too many entries, or none of a prompt."""
    found = _Violations()
    _check_counts(found, counts, names, model, limits)
    found.raise_any()


def check_num_prompts(client_request: ClientRequest, limits: Limits) -> None:
    """Raises InvalidRequest for a list that is too long."""
    found, names, num_prompts = _Violations(), client_request.names, client_request.num_prompts
    field = prompt_field(client_request.prompt, names)
    if num_prompts > limits.max_prompts:
        found.add(field, f"has {num_prompts} prompts; at most {limits.max_prompts} are taken at once")
    if num_prompts > 1 and client_request.options.idempotency_key:
        one = f"with {names['idempotency_key']} there is one answer: send one prompt"
        found.add(field, f"has {num_prompts} prompts; {one}")
    found.raise_any()


def check_all_prompts(by_prompt: Sequence[CheckedRequest], limits: Limits) -> None:
    """What the prompts of a list are too much for together. Raises InvalidRequest."""
    found = _Violations()
    num_tokens = sum(len(checked.prompt_token_ids) for checked in by_prompt)
    _check_prompt_logprobs(found, by_prompt[0].client_request, limits, num_tokens)
    found.raise_any()


def check_fields(client_request: ClientRequest, model: ServedModel, limits: Limits) -> None:
    """Raises InvalidRequest with every wrong field. Costs little, however large the prompt is."""
    found = _Violations()
    _check_counts(found, _counts_of(client_request), client_request.names, model, limits)
    _check_prompt_form(found, client_request, model, limits)
    _check_names(found, client_request)
    _check_key(found, client_request)
    _check_numbers(found, client_request, model)
    _check_logit_bias(found, client_request, model)
    _check_stops(found, client_request, model)
    found.raise_any()


def check_prompt(
    client_request: ClientRequest,
    model: ServedModel,
    limits: Limits,
    prompt_token_ids: Sequence[int],
    scope: RequestScope,
) -> CheckedRequest:
    """Raises InvalidRequest for a prompt that is empty or leaves no room in the context, or under a cap."""
    found = _Violations()
    num_prompt, context = len(prompt_token_ids), model.max_context_tokens
    field = prompt_field(client_request.prompt, client_request.names)
    found.check(num_prompt > 0, field, "is empty; give at least one token")
    found.check(
        num_prompt < context,
        field,
        f"is {num_prompt} tokens; {model.name} takes at most {context - 1}, so that one token of output fits",
    )
    options, caps = client_request.options, scope.caps
    for violation in find_too_long(client_request, caps, field, num_prompt, context):
        found.add(violation.field, violation.description)
    default_max_tokens = caps.default_max_tokens(num_prompt, limits.default_max_tokens)
    max_tokens = min(default_max_tokens if options.max_tokens is None else options.max_tokens, context - num_prompt)
    found.raise_any()
    eos_ids = () if options.ignore_eos else model.eos_token_ids
    return CheckedRequest(
        client_request=client_request,
        model=model,
        prompt_token_ids=tuple(prompt_token_ids),
        sampling=_sampling_of(options, caps, scope.tenant),
        stop_rules=StopRules(
            max_tokens=max_tokens,
            stop_token_ids=tuple(dict.fromkeys((*eos_ids, *options.stop_token_ids))),
            min_tokens=min(options.min_tokens or 0, max_tokens),
        ),
        scope=scope,
    )


def prompt_field(prompt: Prompt, names: FieldNames) -> str:
    """What the client calls the prompt that it sent."""
    match prompt:
        case Text():
            return names["text"]
        case TokenIds():
            return names["token_ids"]
        case Conversation():
            return names["messages"]


def check_plain_prompt(prompt: Prompt, names: FieldNames, model: ServedModel, limits: Limits) -> None:
    """Of a text or a conversation that is only tokenized, or tokens that only become text: with no answer behind it, it
    may be empty, and a text may come to more tokens than the context. Raises InvalidRequest."""
    found = _Violations()
    match prompt:
        case Text(text):
            _check_bytes(found, names["text"], _num_bytes(text), limits)
        case TokenIds(ids) if len(ids) > model.max_context_tokens:
            found.add(names["token_ids"], f"is {len(ids)} tokens; at most {model.max_context_tokens} are taken")
        case TokenIds(ids):
            _check_token_ids(found, names["token_ids"], ids, model)
        case Conversation(messages):
            _check_num_messages(found, names, len(messages), limits)
            found.raise_any()
            _check_messages(found, names, prompt, limits)
    found.raise_any()


def _counts_of(client_request: ClientRequest) -> Counts:
    return Counts(
        messages=len(client_request.prompt.messages) if isinstance(client_request.prompt, Conversation) else None,
        token_ids=len(client_request.prompt.ids) if isinstance(client_request.prompt, TokenIds) else None,
        stop=len(client_request.options.stop),
        stop_token_ids=len(client_request.options.stop_token_ids),
        logit_bias=len(client_request.options.logit_bias),
    )


def _check_counts(found: _Violations, counts: Counts, names: FieldNames, model: ServedModel, limits: Limits) -> None:
    if counts.messages is not None:
        _check_num_messages(found, names, counts.messages, limits)
    if counts.token_ids == 0:
        found.add(names["token_ids"], "is empty; give at least one token id")
    if counts.token_ids is not None and counts.token_ids >= model.max_context_tokens:
        limit = f"{model.name} takes at most {model.max_context_tokens - 1}"
        found.add(names["token_ids"], f"is {counts.token_ids} tokens; {limit}, so that one token of output fits")
    for name, number, maximum, unit in (
        ("stop", counts.stop, _MAX_STOPS, "strings"),
        ("stop_token_ids", counts.stop_token_ids, _MAX_STOP_TOKEN_IDS, "ids"),
        ("logit_bias", counts.logit_bias, MAX_LOGIT_BIAS, "tokens"),
    ):
        found.check(number <= maximum, names[name], f"has {number} {unit}; at most {maximum}")


def _check_prompt_form(found: _Violations, client_request: ClientRequest, model: ServedModel, limits: Limits) -> None:
    names = client_request.names
    match client_request.prompt:
        case Text(text):
            found.check(text != "", names["text"], "is empty; give at least one character")
            _check_bytes(found, names["text"], _num_bytes(text), limits)
        case TokenIds(ids):
            if len(ids) < model.max_context_tokens:
                _check_token_ids(found, names["token_ids"], ids, model)
        case Conversation(messages):
            if len(messages) <= limits.max_messages:
                _check_messages(found, names, client_request.prompt, limits)


def _check_num_messages(found: _Violations, names: FieldNames, num_messages: int, limits: Limits) -> None:
    if not 1 <= num_messages <= limits.max_messages:
        found.add(names["messages"], f"has {num_messages} turns; give from 1 to {limits.max_messages}")


def _check_messages(found: _Violations, names: FieldNames, conversation: Conversation, limits: Limits) -> None:
    num_bytes = 0
    for index, message in enumerate(conversation.messages):
        role = message["role"]
        expected = f"must be one of {', '.join(_ROLES)}"
        found.check(role in _ROLES, f"{names['messages']}[{index}].role", f"is {role[:40]!r}; {expected}")
        num_bytes += _num_bytes(message["content"]) + _num_bytes(message.get("reasoning_content", ""))
        num_bytes += sum(len(str(call)) for call in message.get("tool_calls", ()))
    _check_bytes(found, names["messages"], num_bytes, limits)
    if conversation.tools is not None:
        _check_bytes(found, names["tools"], conversation.tools.num_bytes, limits)


def _check_names(found: _Violations, client_request: ClientRequest) -> None:
    options, names = client_request.options, client_request.names
    if options.request_id and not REQUEST_ID.fullmatch(options.request_id):
        found.add(names["request_id"], f"is {options.request_id[:80]!r}; use 1 to 64 characters of A-Z a-z 0-9 _ -")
    if not _LANE.fullmatch(options.lane):
        found.add(names["lane"], f"is {options.lane[:80]!r}; use at most 64 characters of A-Z a-z 0-9 _ . -")
    if len(options.cache_salt) > _MAX_SALT_CHARS:
        num_chars = len(options.cache_salt)
        found.add(names["cache_salt"], f"has {num_chars} characters; at most {_MAX_SALT_CHARS} are allowed")


def _check_key(found: _Violations, client_request: ClientRequest) -> None:
    options, names = client_request.options, client_request.names
    key, name = options.idempotency_key, names["idempotency_key"]
    if key and not IDEMPOTENCY_KEY.fullmatch(key):
        found.add(name, f"has {len(key)} characters; use 1 to 255, all visible and of ASCII")
    if key and options.n not in (None, 1):
        found.add(names["n"], f"is {options.n}; with {name} there is one answer: leave it out")
    if not key and options.resume_from is not None:
        found.add(names["resume_from"], f"needs {name}: only a request that has one can be gone on with")


def _check_numbers(found: _Violations, client_request: ClientRequest, model: ServedModel) -> None:
    options, names = client_request.options, client_request.names
    for rule in NUMBER_RULES:
        value = getattr(options, rule.name)
        problem = None if value is None else rule.try_find_problem(value, model.max_context_tokens)
        if problem is not None:
            found.add(names[rule.name], problem)
    max_tokens, min_tokens = options.max_tokens, options.min_tokens
    if max_tokens is not None and min_tokens is not None and min_tokens > max_tokens:
        found.add(names["min_tokens"], f"is {min_tokens}; must be at most max_tokens, which is {max_tokens}")


def _check_logit_bias(found: _Violations, client_request: ClientRequest, model: ServedModel) -> None:
    biases, name = client_request.options.logit_bias, client_request.names["logit_bias"]
    if len(biases) > MAX_LOGIT_BIAS:
        return
    for token_id, bias in biases:
        problem = LOGIT_BIAS_RULE.try_find_problem(bias, model.max_context_tokens)
        if not 0 <= token_id < model.vocab_size:
            limit = f"must be from 0 to {model.vocab_size - 1}, the vocabulary of {model.name}"
            found.add(f"{name}[{token_id}]", f"is of token {token_id}; {limit}")
        elif problem is not None:
            found.add(f"{name}[{token_id}]", problem)


def _check_prompt_logprobs(found: _Violations, client_request: ClientRequest, limits: Limits, num_prompt: int) -> None:
    num_top = client_request.options.prompt_logprobs
    if num_top is not None and num_prompt * (1 + num_top) > limits.max_prompt_logprobs:
        num_entries = f"{num_prompt} tokens of prompt times 1 + {num_top} are {num_prompt * (1 + num_top)}"
        limit = f"{num_entries}, at most {limits.max_prompt_logprobs}"
        found.add(client_request.names["prompt_logprobs"], f"is {num_top}; {limit}")


def _check_stops(found: _Violations, client_request: ClientRequest, model: ServedModel) -> None:
    options, names = client_request.options, client_request.names
    for index, stop in enumerate(options.stop[:_MAX_STOPS]):
        field = f"{names['stop']}[{index}]"
        found.check(1 <= len(stop) <= _MAX_STOP_CHARS, field, f"has {len(stop)} characters; use 1 to {_MAX_STOP_CHARS}")
    if len(options.stop_token_ids) <= _MAX_STOP_TOKEN_IDS:
        _check_token_ids(found, names["stop_token_ids"], options.stop_token_ids, model)


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


def _sampling_of(options: GenerateOptions, caps: CapsInForce, tenant: str) -> SamplingParams:
    names = [rule.name for rule in NUMBER_RULES if rule.group == "sampling" and rule.name != "seed"]
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    if caps.default_top_k is not None:
        given.setdefault("top_k", caps.default_top_k)
    bias = tuple(sorted(options.logit_bias))
    return SamplingParams(**given, seed=_seed_of(options, tenant), logit_bias=bias, grammar=options.grammar)


def _seed_of(options: GenerateOptions, tenant: str) -> int:
    """A client that names its request gets the same tokens when it sends the request again."""
    if options.seed is not None:
        return options.seed
    if options.idempotency_key:
        return seed_of_key(tenant, options.idempotency_key)
    if options.request_id:
        return int.from_bytes(hashlib.blake2b(options.request_id.encode(), digest_size=8).digest())
    return secrets.randbits(64)

"""Parts that several messages of `weir.v1` share, to Python and back: attempts, options, sampling and scheduling
parameters, log-probabilities, finish reasons.
"""

from collections.abc import Sequence
from typing import Any

from weir.core.errors import FieldViolation, InvalidRequest
from weir.core.grammar import GRAMMAR_KINDS, Grammar, GrammarKind
from weir.core.life import Attempt, FinishReason, SchedulingParams, attempt_of
from weir.core.options import LOGIT_BIAS_RULE, NUMBER_RULES, GenerateOptions, NumberRule
from weir.core.sampling import SamplingParams, TokenLogprobs
from weir.wire.v1 import inference_pb2, types_pb2

_MAX_UINT32 = 2**32 - 1
_SAMPLING_RULES = tuple(rule for rule in NUMBER_RULES if rule.group == "sampling")
_FINISH_REASONS: dict[FinishReason, types_pb2.FinishReason.ValueType] = {
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: types_pb2.FINISH_REASON_CANCELLED,
    FinishReason.DEADLINE: types_pb2.FINISH_REASON_DEADLINE,
    FinishReason.TOOL_CALLS: types_pb2.FINISH_REASON_TOOL_CALLS,
}
_FROM_PB = {value: reason for reason, value in _FINISH_REASONS.items()}
_GRAMMAR_KINDS: dict[GrammarKind, types_pb2.GrammarKind.ValueType] = {
    "json_schema": types_pb2.GRAMMAR_KIND_JSON_SCHEMA,
    "regex": types_pb2.GRAMMAR_KIND_REGEX,
    "choice": types_pb2.GRAMMAR_KIND_CHOICE,
    "grammar": types_pb2.GRAMMAR_KIND_GRAMMAR,
}
_KIND_OF = {value: kind for kind, value in _GRAMMAR_KINDS.items()}
OPTIONAL_SAMPLING = ("logprobs", "prompt_logprobs")
"""Parameters that may be absent in `SamplingParams` too."""


def attempt_to_pb(attempt: Attempt) -> types_pb2.Attempt:
    return types_pb2.Attempt(dispatch=attempt.dispatch, adoption=attempt.adoption)


def attempt_from_pb(message: types_pb2.Attempt) -> Attempt:
    return attempt_of(message.dispatch, message.adoption)


def options_to_pb(options: GenerateOptions) -> inference_pb2.RequestOptions:
    """Raises InvalidRequest for numbers and texts that the wire cannot carry; the gateway checks all others."""
    for name in ("request_id", "model", "lane", "cache_salt", "idempotency_key"):
        check_text(name, getattr(options, name))
    for index, stop in enumerate(options.stop):
        check_text(f"stop[{index}]", stop)
    for index, token_id in enumerate(options.stop_token_ids):
        check_token_id(f"stop_token_ids[{index}]", token_id)
    for token_id, _ in options.logit_bias:
        check_token_id(f"logit_bias[{token_id}]", token_id)
    message = inference_pb2.RequestOptions(
        request_id=options.request_id,
        model=options.model,
        lane=options.lane,
        cache_salt=options.cache_salt,
        skips_prefix_cache=options.skips_prefix_cache,
        partial_at_deadline=options.partial_at_deadline,
        idempotency_key=options.idempotency_key,
        sampling=types_pb2.SamplingParams(logit_bias=dict(options.logit_bias), grammar=_grammar_to_pb(options.grammar)),
        stop_conditions=inference_pb2.StopConditions(
            stop=options.stop,
            stop_token_ids=options.stop_token_ids,
            include_stop=options.include_stop,
            ignore_eos=options.ignore_eos,
        ),
    )
    for rule in NUMBER_RULES:
        value = getattr(options, rule.name)
        if value is not None:
            _set(_message_of(message, rule), rule, value)
    return message


def options_from_pb(message: inference_pb2.RequestOptions) -> GenerateOptions:
    """Absent fields become None. Checks nothing."""
    sampling, stop = message.sampling, message.stop_conditions
    return GenerateOptions(
        model=message.model,
        lane=message.lane,
        request_id=message.request_id,
        logit_bias=tuple(sorted(sampling.logit_bias.items())),
        grammar=_grammar_from_pb(sampling),
        stop=tuple(stop.stop),
        stop_token_ids=tuple(stop.stop_token_ids),
        include_stop=stop.include_stop,
        ignore_eos=stop.ignore_eos,
        cache_salt=message.cache_salt,
        skips_prefix_cache=message.skips_prefix_cache,
        partial_at_deadline=message.partial_at_deadline,
        idempotency_key=message.idempotency_key,
        **{rule.name: _try_get(_message_of(message, rule), rule.name) for rule in NUMBER_RULES},
    )


def sampling_to_pb(params: SamplingParams) -> types_pb2.SamplingParams:
    """Every field present, but those of OPTIONAL_SAMPLING that are None."""
    message = types_pb2.SamplingParams(logit_bias=dict(params.logit_bias), grammar=_grammar_to_pb(params.grammar))
    for rule in _SAMPLING_RULES:
        value = getattr(params, rule.name)
        if value is not None:
            setattr(message, rule.name, value)
    return message


def sampling_from_pb(message: types_pb2.SamplingParams) -> SamplingParams:
    """Checks nothing: see `sampling_problems`."""
    values = {rule.name: _try_get(message, rule.name) for rule in _SAMPLING_RULES}
    bias = tuple(sorted(message.logit_bias.items()))
    return SamplingParams(**values, logit_bias=bias, grammar=_grammar_from_pb(message))


def sampling_problems(message: types_pb2.SamplingParams) -> list[tuple[str, str]]:
    """(field, what is wrong with it): absent, or out of range."""
    problems = []
    for rule in _SAMPLING_RULES:
        if message.HasField(rule.name):  # type: ignore[arg-type]  # names of the table, tested against the message
            problem = rule.try_find_problem(getattr(message, rule.name), max_context_tokens=0)
            if problem is not None:
                problems.append((rule.name, problem))
        elif rule.name not in OPTIONAL_SAMPLING:
            problems.append((rule.name, "must be given"))
    for token_id, bias in message.logit_bias.items():
        problem = LOGIT_BIAS_RULE.try_find_problem(bias, max_context_tokens=0)
        if problem is not None:
            problems.append((f"logit_bias[{token_id}]", problem))
    if message.HasField("grammar") and not 1 <= message.grammar.kind <= len(GRAMMAR_KINDS):
        problems.append(("grammar.kind", f"is {message.grammar.kind}; must be from 1 to {len(GRAMMAR_KINDS)}"))
    return problems


def _grammar_to_pb(grammar: Grammar | None) -> types_pb2.Grammar | None:
    """Raises InvalidRequest."""
    if grammar is None:
        return None
    if grammar.kind not in GRAMMAR_KINDS:
        expected = f"must be one of {', '.join(GRAMMAR_KINDS)}"
        raise InvalidRequest([FieldViolation("grammar.kind", f"is {grammar.kind!r}; {expected}")])
    check_text("grammar", grammar.source)
    return types_pb2.Grammar(kind=_GRAMMAR_KINDS[grammar.kind], source=grammar.source)


def _grammar_from_pb(message: types_pb2.SamplingParams) -> Grammar | None:
    """One of a kind that is not known is empty, which is refused."""
    if not message.HasField("grammar"):
        return None
    kind = _KIND_OF.get(message.grammar.kind)
    return Grammar("grammar", "") if kind is None else Grammar(kind, message.grammar.source)


def logprobs_to_pb(logprobs: TokenLogprobs) -> types_pb2.TokenLogprobs:
    return types_pb2.TokenLogprobs(
        token_id=logprobs.token_id,
        logprob=logprobs.logprob,
        rank=logprobs.rank,
        top_token_ids=[token_id for token_id, _ in logprobs.top],
        top_logprobs=[logprob for _, logprob in logprobs.top],
    )


def logprobs_from_pb(message: types_pb2.TokenLogprobs) -> TokenLogprobs:
    top = tuple(zip(message.top_token_ids, message.top_logprobs, strict=False))
    return TokenLogprobs(message.token_id, message.logprob, message.rank, top)


def all_logprobs_from_pb(messages: Sequence[types_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(logprobs_from_pb(message) for message in messages)


def scheduling_to_pb(params: SchedulingParams) -> types_pb2.SchedulingParams:
    return types_pb2.SchedulingParams(
        lane_priority=params.lane_priority,
        rank=params.rank,
        itl_target_ms=params.itl_target_ms,
        predicted_output_tokens=params.predicted_output_tokens,
    )


def scheduling_from_pb(message: types_pb2.SchedulingParams) -> SchedulingParams:
    """Checks nothing."""
    return SchedulingParams(message.lane_priority, message.rank, message.itl_target_ms, message.predicted_output_tokens)


def finish_reason_to_pb(reason: FinishReason | None) -> types_pb2.FinishReason.ValueType:
    """None: not ended."""
    return types_pb2.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH_REASONS[reason]


def finish_reason_from_pb(value: types_pb2.FinishReason.ValueType) -> FinishReason | None:
    """None: not ended, or a reason that a newer peer knows."""
    return _FROM_PB.get(value)


def check_token_id(field: str, token_id: int) -> None:
    """Raises InvalidRequest for an id that the wire cannot carry."""
    if not 0 <= token_id <= _MAX_UINT32:
        raise InvalidRequest([FieldViolation(field, f"is {token_id}; must be from 0 to {_MAX_UINT32}")])


def check_text(field: str, text: str) -> None:
    """Raises InvalidRequest for a text that the wire, which is UTF-8, cannot carry."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = f"has {text[error.start]!r} at {error.start}; must be valid Unicode"
        raise InvalidRequest([FieldViolation(field, problem)]) from None


def _set(message: Any, rule: NumberRule, value: float) -> None:
    try:
        setattr(message, rule.name, value)
    except TypeError:
        raise InvalidRequest([FieldViolation(rule.name, f"is {value!r}; must be a number of its kind")]) from None
    except ValueError:
        problem = f"is {value}; must be {rule.described(max_context_tokens=None)}"
        raise InvalidRequest([FieldViolation(rule.name, problem)]) from None


def _message_of(message: inference_pb2.RequestOptions, rule: NumberRule) -> Any:
    return getattr(message, rule.group) if rule.group else message


def _try_get(message: Any, name: str) -> Any:
    return getattr(message, name) if message.HasField(name) else None

"""Where the prompt of a request leaves its model's reasoning, and what that means for a grammar and a budget."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from weir.core.errors import FieldViolation, InvalidRequest
from weir.grammar.protocol import GrammarError
from weir_gateway.answers.formats import RegionMarkers
from weir_gateway.answers.reasoning import (
    ReasoningState,
    reasoning_grammar,
    state_at_end,
    state_within_message,
)
from weir_gateway.requests.client_request import ClientRequest, Conversation, Prompt
from weir_gateway.requests.models import ServedModel

_MAX_TAIL_TOKENS = 32
"""More than a marker and the white space after it are."""


def reasoning_state(prompt: Prompt, prompt_token_ids: Sequence[int], model: ServedModel) -> ReasoningState:
    """AFTER where there is none to come: of a model that does not reason, and of a prompt that is no conversation."""
    markers = model.answer_format.reasoning
    if markers is None or not isinstance(prompt, Conversation):
        return ReasoningState.AFTER
    if prompt.continue_final_message:
        return state_within_message(str(prompt.messages[-1]["content"]), markers)
    return state_at_end(model.tokenizer.decode(prompt_token_ids[-_MAX_TAIL_TOKENS:], skip_special=False), markers)


def with_reasoning_grammar(
    client_request: ClientRequest, model: ServedModel, prompt_token_ids: Sequence[int]
) -> ClientRequest:
    """The same with a grammar that lets the model reason first, where it has one, or a budget for that.

    Raises InvalidRequest for a budget of a model that is not known to reason, and where the end of reasoning cannot be
    told from other text by its tokens.
    """
    prompt, content, names = client_request.prompt, client_request.options.grammar, client_request.names
    budget = prompt.max_reasoning_tokens if isinstance(prompt, Conversation) else None
    field = names["max_reasoning_tokens"] if content is None else names["grammar"]
    markers = model.answer_format.reasoning
    if markers is None:
        if budget:
            _refuse(
                names["max_reasoning_tokens"],
                f"model {model.name} is not known to reason: the form of that is found in its chat template. Its "
                "operator can name it (--reasoning-format)",
            )
        return client_request
    state = reasoning_state(prompt, prompt_token_ids, model)
    if state is ReasoningState.AFTER or (content is None and budget is None):
        return client_request
    tokens = _try_find_tokens(markers, model)
    if tokens is None:
        if state is ReasoningState.BEFORE and budget is None:
            return client_request  # it answers at once
        _refuse(field, f"model {model.name} writes {markers.closes} in several tokens, at which nothing can be held")
    free = model.marker_token_ids - set(tokens)
    try:
        grammar = reasoning_grammar(content, state, tokens, markers.closes, max_tokens=budget, free_token_ids=free)
    except GrammarError as error:
        _refuse(names["grammar"], str(error))
    options = replace(client_request.options, grammar=grammar)
    return replace(client_request, options=options, names={**names, "grammar": field})


def _try_find_tokens(markers: RegionMarkers, model: ServedModel) -> tuple[int, int] | None:
    """Of the opening marker and the closing one."""
    opens, closes = model.token_of(markers.opens), model.token_of(markers.closes)
    return None if opens is None or closes is None else (opens, closes)


def _refuse(field: str, problem: str) -> NoReturn:
    raise InvalidRequest([FieldViolation(field, problem)])

"""What makes text of a request's tokens, and parts of its text."""

from typing import NamedTuple

from weir_gateway.answers.formats import AnswerFormat
from weir_gateway.answers.parser import AnswerParser
from weir_gateway.answers.reasoning import ReasoningState
from weir_gateway.requests.client_request import Conversation
from weir_gateway.requests.models import Detokenizer
from weir_gateway.requests.reasoning import reasoning_state
from weir_gateway.requests.stop_strings import StopMatcher
from weir_gateway.requests.validation import CheckedRequest


class TextParts(NamedTuple):
    """`parser` None: nobody asks for anything but text."""

    detokenizer: Detokenizer
    stops: StopMatcher
    parser: AnswerParser | None = None


def text_parts_of(checked: CheckedRequest) -> TextParts:
    """A function of the request and its prompt alone: whoever feeds it the same tokens gets the same parts."""
    options, model = checked.client_request.options, checked.model
    stops = StopMatcher(options.stop, is_included=options.include_stop)
    parser = _try_make_parser(checked)
    shown = frozenset[int]() if parser is None else model.marker_token_ids
    return TextParts(model.tokenizer.detokenizer(shown=shown), stops, parser)


def _try_make_parser(checked: CheckedRequest) -> AnswerParser | None:
    prompt, model, tools = checked.client_request.prompt, checked.model, checked.client_request.tools
    markers = model.answer_format.reasoning
    if not isinstance(prompt, Conversation) or (tools is None and markers is None):
        return None
    state = reasoning_state(prompt, checked.prompt_token_ids, model)
    return AnswerParser(
        AnswerFormat(None if state is ReasoningState.AFTER else markers, model.answer_format.tools),
        tool_names=frozenset[str]() if tools is None else tools.allowed,
        starts_in_reasoning=state is ReasoningState.WITHIN,
        schemas={} if tools is None else {tool.name: tool.schema for tool in tools.callable_tools},
    )

"""Where a prompt leaves its model: before, within or after its reasoning; and the grammar of an answer that reasons.

A prompt ends after what the chat template makes of the conversation. Some templates open the reasoning there, some
close it at once where it is not wanted, most leave it to the model. So the end of the prompt says it, and no option.

The grammar is that of the answer itself, behind free text up to the closing marker. Its state is thus a function of
grammar and output tokens as any other's is, and is made again from a record as any other's is.
"""

from enum import Enum, auto

from weir.core.grammar import Grammar
from weir.grammar.lark import rule_of
from weir_gateway.answers.formats import THINK, RegionMarkers

REASONING_FORMATS = ("auto", "think", "none")


class ReasoningState(Enum):
    """Of a prompt, at its end."""

    BEFORE = auto()
    """The model may reason, or not."""
    WITHIN = auto()
    AFTER = auto()


def choose_reasoning_format(named: str, template: str) -> RegionMarkers | None:
    """`named`: one of `REASONING_FORMATS`; "auto" finds it in the model's chat template. None: it does not reason."""
    if named not in REASONING_FORMATS:
        raise ValueError(f"reasoning_format {named!r}: must be one of {', '.join(REASONING_FORMATS)}")
    is_known = THINK.opens in template or THINK.closes in template
    return THINK if named == "think" or (named == "auto" and is_known) else None


def state_at_end(prompt_tail: str, markers: RegionMarkers) -> ReasoningState:
    """Of a prompt that asks for a new message: what it ends with, but for white space, is the template's. Markers
    further up are somebody's words."""
    tail = prompt_tail.rstrip()
    if tail.endswith(markers.opens):
        return ReasoningState.WITHIN
    return ReasoningState.AFTER if tail.endswith(markers.closes) else ReasoningState.BEFORE


def state_within_message(message: str, markers: RegionMarkers) -> ReasoningState:
    """Of a prompt that ends where this message does, for the model to go on with it."""
    if not message.strip():
        return ReasoningState.BEFORE
    is_open = message.lstrip().startswith(markers.opens) and markers.closes not in message
    return ReasoningState.WITHIN if is_open else ReasoningState.AFTER


def reasoning_grammar(
    content: Grammar | None,
    state: ReasoningState,
    markers: tuple[int, int],
    closing_text: str,
    *,
    max_tokens: int | None = None,
    free_token_ids: frozenset[int] = frozenset(),
) -> Grammar | None:
    """Of an answer whose content has the grammar `content` (None: any text) after at most `max_tokens` tokens of
    reasoning (None: as many as it wants), at which the closing marker must come. None: of a free answer.

    `markers`: the token that opens reasoning, and the one that closes it, which `closing_text` spells: as ordinary
    pieces it may not come, so that reasoning ends where its text does. `free_token_ids`: special tokens that a free
    text has, as those of calls. Raises GrammarError for a source that cannot be a part of another.
    """
    if state is ReasoningState.AFTER or (content is None and max_tokens is None):
        return content
    opens, closes = (f"<[{token_id}]>" for token_id in markers)
    thought = f"{'' if max_tokens == 0 else 'thought '}{closes} LINES?"
    start = f"{thought} content" if state is ReasoningState.WITHIN else f"({opens} {thought})? content"
    bound = "" if max_tokens is None else f"[max_tokens={max_tokens}]"
    rules = [f"start: {start}", r"LINES: /\n{1,2}/"]
    if max_tokens != 0:
        rules += [f"thought{bound}: THOUGHT", rf"THOUGHT: /(.|\n)*/ & ~/(.|\n)*{_regex_of(closing_text)}(.|\n)*/"]
    return Grammar("grammar", "\n".join([*rules, *_content_rules(content, free_token_ids)]))


def _content_rules(content: Grammar | None, free_token_ids: frozenset[int]) -> list[str]:
    if content is not None:
        return [f"content: {rule_of(content)}"]
    free = " | ".join(("FREE", *(f"<[{token_id}]>" for token_id in sorted(free_token_ids))))
    return [f"content: ({free})*", r"FREE: /(.|\n)+/"]


def _regex_of(text: str) -> str:
    """Of a regular expression between slashes: each character as itself."""
    return "".join(char if char.isalnum() or char in "<>_" else f"\\{char}" for char in text)

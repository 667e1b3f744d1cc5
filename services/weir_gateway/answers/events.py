"""The parts of an answer, in the order of its text."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContentText:
    """More of what is meant for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegan:
    """`index`: of the call in the answer, from 0 on. `name`: whole, and of a tool that was declared."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """More of a call's arguments, a JSON object, as the model wrote it."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnded:
    """The call's arguments are complete. Of a call that is cut off there is none."""

    index: int


AnswerEvent = ContentText | ReasoningText | ToolCallBegan | ToolArguments | ToolCallEnded


def join_events(events: Iterable[AnswerEvent]) -> list[AnswerEvent]:
    """The same with neighbouring texts of one kind as one, and none that is empty."""
    joined: list[AnswerEvent] = []
    run: list[str] = []
    kind: AnswerEvent | None = None
    for event in events:
        if kind is not None and not _continues(kind, event):
            joined.append(_with_text(kind, "".join(run)))
            kind, run = None, []
        if isinstance(event, ToolCallBegan | ToolCallEnded):
            joined.append(event)
        elif event.text:
            kind = event
            run.append(event.text)
    if kind is not None:
        joined.append(_with_text(kind, "".join(run)))
    return joined


def _continues(first: AnswerEvent, second: AnswerEvent) -> bool:
    if isinstance(second, ToolArguments):
        return isinstance(first, ToolArguments) and first.index == second.index
    return not isinstance(second, ToolCallBegan | ToolCallEnded) and (type(second) is type(first) or not second.text)


def _with_text(event: AnswerEvent, text: str) -> AnswerEvent:
    if isinstance(event, ToolArguments):
        return ToolArguments(event.index, text)
    return ReasoningText(text) if isinstance(event, ReasoningText) else ContentText(text)

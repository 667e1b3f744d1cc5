"""From the text of an answer, as it comes, to its parts.

                 ┌────────── closing marker ──────────┐
                 │                                    v
start ──> reasoning <──(call)──> reading a call <──> content
  └────────────────────────────────^───────────────────^
"""

from collections.abc import Mapping
from enum import Enum, auto
from types import MappingProxyType
from typing import Any

from weir_gateway.answers.calls import CallReader, JsonCallReader, NamedCallReader, Reading
from weir_gateway.answers.events import AnswerEvent, ContentText, ReasoningText, join_events
from weir_gateway.answers.formats import AnswerFormat, CallSyntax
from weir_gateway.answers.markers import MAX_SPACE_CHARS, MarkerSet
from weir_gateway.answers.parameter_calls import ParameterCallReader


class _Region(Enum):
    START = auto()
    """Of the answer, or of what follows its reasoning: nothing but white space yet."""
    REASONING = auto()
    CONTENT = auto()


class AnswerParser:
    """Tells apart what one answer is made of. How its text is cut makes no difference: the events of feed(a) and
    feed(b), texts that meet joined, are those of feed(a + b). Work and memory are linear in the text.

    Markers count in the text, however it was tokenized, so prose that spells one in full is taken for it. White space
    at a marker belongs to it (before one at most `MAX_SPACE_CHARS` characters). An answer can reason only at its
    beginning. A call may come anywhere, also within reasoning, which goes on after it; what looks like one and is
    none, or one of a tool that was not declared, is text of the region that it is in, markers and all.
    """

    def __init__(
        self,
        answer_format: AnswerFormat,
        *,
        tool_names: frozenset[str] = frozenset(),
        starts_in_reasoning: bool = False,
        schemas: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    ) -> None:
        """`starts_in_reasoning`: the prompt ends within reasoning, whose opening marker the answer then lacks. Without
        `tool_names` nothing is a call. `schemas`: of tools' arguments, by name; only a format whose calls do not tell a
        number from a text looks at them."""
        if starts_in_reasoning and answer_format.reasoning is None:
            raise ValueError("an answer can only start in reasoning if its format has reasoning")
        reasoning, tools = answer_format.reasoning, answer_format.tools if tool_names else None
        openers = () if tools is None else tools.opens
        self._tools = tools
        self._tool_names = tool_names
        self._schemas = schemas
        self._reasoning_opener = None if reasoning is None or starts_in_reasoning else reasoning.opens
        self._reasoning_closer = None if reasoning is None else reasoning.closes
        self._call_closers = MarkerSet(() if tools is None else tools.closes)
        self._in_content = MarkerSet(openers)
        self._in_reasoning = MarkerSet((*openers, self._reasoning_closer) if self._reasoning_closer else openers)
        self._at_start = MarkerSet((*openers, self._reasoning_opener) if self._reasoning_opener else openers)
        self._region = _Region.REASONING if starts_in_reasoning else _Region.START
        self._follows_marker = starts_in_reasoning
        self._follows_call = False
        self._may_reason = reasoning is not None
        self._held = ""
        self._call: CallReader | None = None
        self._call_head = ""
        """What led to the call that is being read: text, if no call comes of it."""
        self._num_calls = 0

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends within reasoning."""
        return self._region is _Region.REASONING

    @property
    def may_reason(self) -> bool:
        """Whether it is in reasoning, or that may begin still."""
        return self._may_reason

    @property
    def num_calls(self) -> int:
        """Calls that have begun and ended."""
        return self._num_calls

    def feed(self, text: str) -> list[AnswerEvent]:
        """What is certain by now. Not to be called after `finish`."""
        text, self._held = self._held + text, ""
        events: list[AnswerEvent] = []
        position = 0
        while position < len(text):
            next_position = self._advance(text, position, events)
            if next_position is None:
                break
            position = next_position
        self._held = text[position:]
        return join_events(events)

    def finish(self) -> list[AnswerEvent]:
        """Nothing follows: what was held back is text of the region that it is in. A call that has begun stays as far
        as it came, without an end."""
        events: list[AnswerEvent] = []
        if self._call is not None:
            self._add_text(self._text_of(self._call), events)
            self._call = None
        self._add_text(self._held, events)
        self._held = ""
        return join_events(events)

    def _advance(self, text: str, position: int, events: list[AnswerEvent]) -> int | None:
        """To where text[position:] has been taken; None: more must come first."""
        if self._call is not None:
            return self._read_call(self._call, text, position, events)
        if self._follows_marker:
            first = _after_space(text, position, len(text))
            if first > position:  # taken by itself: it is not held with what may become a marker
                return first
            if self._follows_call:
                return self._close_call(text, position)
            self._follows_marker = False
        if self._region is _Region.START:
            return self._leave_start(text, position, events)
        return self._take_text(text, position, events)

    def _leave_start(self, text: str, position: int, events: list[AnswerEvent]) -> int | None:
        first = _after_space(text, position, position + MAX_SPACE_CHARS)
        if first == len(text):
            return None
        marker = self._at_start.match(text, first)
        if marker is not None:
            self._open(marker, text[position : first + len(marker)])
            return first + len(marker)
        if self._at_start.may_begin(text, first):
            return None
        if self._tools is not None and self._tools.is_bare and text[first] == "{":
            self._begin_call(text[position:first], is_bare=True)
            return first
        self._region, self._may_reason = _Region.CONTENT, False
        return position

    def _take_text(self, text: str, position: int, events: list[AnswerEvent]) -> int | None:
        markers = self._in_reasoning if self.is_reasoning else self._in_content
        found = markers.find(text, position)
        if found is None:
            end = markers.held_from(text, position)
            self._add_text(text[position:end], events)
            return end if end > position else None
        self._add_text(text[position : found.text_end], events)
        self._open(found.marker, text[found.text_end : found.end])
        return found.end

    def _open(self, marker: str, head: str) -> None:
        """`head`: the marker and the white space before it."""
        if self.is_reasoning and marker == self._reasoning_closer:
            self._region, self._at_start = _Region.START, self._in_content
            self._follows_marker, self._may_reason = True, False
        elif self._region is _Region.START and marker == self._reasoning_opener:
            self._region = _Region.REASONING
            self._follows_marker = True
        else:
            self._begin_call(head, is_bare=False)

    def _begin_call(self, head: str, *, is_bare: bool) -> None:
        self._call_head = head
        syntax = CallSyntax.JSON if self._tools is None else self._tools.syntax
        if syntax is CallSyntax.NAMED:
            self._call = NamedCallReader(self._tool_names, self._num_calls)
        elif syntax is CallSyntax.PARAMETERS:
            self._call = ParameterCallReader(self._tool_names, self._num_calls, self._schemas)
        else:
            self._call = JsonCallReader(self._tool_names, self._num_calls, is_bare=is_bare)

    def _read_call(self, call: CallReader, text: str, position: int, events: list[AnswerEvent]) -> int | None:
        end = call.read(text, position, events)
        if call.state is Reading.GOING_ON:
            return end if end > position else None
        if call.state is Reading.NO_CALL:
            self._add_text(self._text_of(call), events)
        if self._region is _Region.START:
            self._at_start, self._may_reason = self._in_content, False
            if call.state is Reading.NO_CALL:
                self._region = _Region.CONTENT
        self._follows_marker = self._follows_call = call.state is Reading.DONE
        self._num_calls = call.next_index
        self._call = None
        return end

    def _close_call(self, text: str, position: int) -> int | None:
        """Past the marker that may follow a call."""
        marker = self._call_closers.match(text, position)
        if marker is None and self._call_closers.may_begin(text, position):
            return None
        self._follows_call = False
        return position + len(marker or "")

    def _text_of(self, call: CallReader) -> str:
        """What has been read of it and not been told."""
        return call.held() if call.has_told else self._call_head + call.held()

    def _add_text(self, text: str, events: list[AnswerEvent]) -> None:
        if text:
            events.append(ReasoningText(text) if self.is_reasoning else ContentText(text))


def _after_space(text: str, start: int, limit: int) -> int:
    """The first place from `start` on, and at most `limit`, that has no white space."""
    while start < min(limit, len(text)) and text[start].isspace():
        start += 1
    return start

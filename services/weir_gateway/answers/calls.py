"""Tool calls, read as they come: where one is certain it is told at once, where none comes of it its text is given
back."""

import json
import re
from enum import Enum, auto
from typing import Protocol

from weir_gateway.answers.events import AnswerEvent, ToolArguments, ToolCallBegan, ToolCallEnded
from weir_gateway.answers.json_values import ValueScanner

_SPACE = " \t\r\n"
_ARGUMENTS_KEYS = ("arguments", "parameters")
_BARE_KEYS = ("name", "type", *_ARGUMENTS_KEYS)
_MAX_NAME_CHARS = 256
"""Of a key and of a tool's name, as JSON. A string that never ends does not take the rest of the answer with it."""
_MAX_HEADER_CHARS = 300
_HEADER = re.compile(r"\s*([A-Za-z0-9_.-]+)(?:\[CALL_ID\][A-Za-z0-9]+)?(?:\[ARGS\])?\s*")
_HEADER_CHARS = re.compile(r"[A-Za-z0-9_.\[\]\s-]*")


class Reading(Enum):
    """How far a reader has come."""

    GOING_ON = auto()
    DONE = auto()
    """What follows is no part of it."""
    NO_CALL = auto()
    """What it holds is text, and what follows."""


class CallReader(Protocol):
    """Reads what follows an opening marker."""

    state: Reading
    next_index: int
    """Of the next call in the answer."""
    has_told: bool
    """Whether a call has begun, for its client too."""

    def read(self, text: str, start: int, events: list[AnswerEvent]) -> int:
        """Reads text[start:], and adds to `events`. Returns to where it has read; what it has not, though it goes on,
        is to be given again with more."""
        ...

    def held(self) -> str:
        """The text that it has read and told nothing of: no call may come of it."""
        ...


class _At(Enum):
    OBJECT = auto()
    """Before an object, or a list."""
    KEY = auto()
    KEY_TEXT = auto()
    COLON = auto()
    VALUE = auto()
    VALUE_TEXT = auto()
    AFTER_VALUE = auto()
    AFTER_OBJECT = auto()
    """In a list."""


class JsonCallReader:
    """`{"name": …, "arguments": {…}}` with its keys in any order, or a list of these.

    A call is told when its arguments begin and its name is known to be a tool's; from then on they pass as they come.
    Arguments that are a string of JSON are unpacked. Without any they are `{}`, but for a bare call, which then is
    none. An object that lacks its last brace ends with its arguments.
    """

    def __init__(self, tool_names: frozenset[str], first_index: int, *, is_bare: bool = False) -> None:
        self.state = Reading.GOING_ON
        self.next_index = first_index
        self.has_told = False
        self._tool_names = tool_names
        self._is_bare = is_bare
        self._in_list = False
        self._held: list[str] = []
        self._at = _At.OBJECT
        self._scanner = ValueScanner()
        self._scan_left = _MAX_NAME_CHARS
        self._captured: list[str] = []
        self._begin_object()

    def held(self) -> str:
        return "".join(self._held)

    def read(self, text: str, start: int, events: list[AnswerEvent]) -> int:
        position = start
        while position < len(text) and self.state is Reading.GOING_ON:
            end = self._step(text, position, events)
            if self._is_told:
                self._held.clear()
            elif end > position:
                self._held.append(text[position:end])
            position = end
        return position

    def _begin_object(self) -> None:
        self._at = _At.OBJECT
        self._name: str | None = None
        self._key = ""
        self._arguments: str | None = None
        self._is_told = False
        """Whether the call has begun for the client."""
        self._is_streaming = False

    def _step(self, text: str, position: int, events: list[AnswerEvent]) -> int:
        """One character, or as much of a value as there is."""
        if self._at in (_At.KEY_TEXT, _At.VALUE_TEXT):
            return self._read_value(text, position, events)
        character = text[position]
        if character in _SPACE:
            return position + 1
        if self._at is _At.VALUE:
            return self._begin_value(text, position, events)
        if self._at is _At.KEY and character == '"':
            self._at = _At.KEY_TEXT
            self._begin_scan()
            return self._read_value(text, position, events)
        return self._structure(character, position, events)

    def _structure(self, character: str, position: int, events: list[AnswerEvent]) -> int:
        if self._at is _At.COLON and character == ":":
            self._at = _At.VALUE
        elif self._at is _At.AFTER_VALUE and character == ",":
            self._at = _At.KEY
        elif self._at in (_At.KEY, _At.AFTER_VALUE) and character == "}":
            return self._end_object(position, events)
        elif self._at is _At.OBJECT and character == "{":
            self._at = _At.KEY
        elif self._at is _At.OBJECT and character == "[" and not (self._in_list or self._is_bare):
            self._in_list = True
        elif self._at is _At.AFTER_OBJECT and character == ",":
            self._begin_object()
        elif self._at is _At.AFTER_OBJECT and character == "]":
            self.state = Reading.DONE
        else:
            return self._stop(position, events)
        return position + 1

    def _begin_scan(self) -> None:
        self._scanner = ValueScanner()
        self._scan_left = _MAX_NAME_CHARS
        self._captured = []

    def _begin_value(self, text: str, position: int, events: list[AnswerEvent]) -> int:
        is_arguments = self._key in _ARGUMENTS_KEYS
        if is_arguments and self._arguments is not None:
            return self._stop(position, events)
        self._at = _At.VALUE_TEXT
        self._begin_scan()
        if is_arguments and self._name is not None and text[position] == "{":
            self._is_streaming = True
            self._tell_name(self._name, events)
        return self._read_value(text, position, events)

    def _read_value(self, text: str, position: int, events: list[AnswerEvent]) -> int:
        is_short = self._at is _At.KEY_TEXT or self._key == "name"
        limit = position + self._scan_left if is_short else len(text)
        end = self._scanner.advance(text, position, limit)
        self._scan_left -= end - position
        if self._is_streaming:
            events.append(ToolArguments(self.next_index, text[position:end]))
            if self._scanner.is_complete:
                self._is_streaming, self._at = False, _At.AFTER_VALUE
            return end
        self._captured.append(text[position:end])
        is_too_long = is_short and not self._scan_left
        if is_too_long or (self._scanner.is_complete and not self._keep("".join(self._captured))):
            return self._stop(end, events)
        return end

    def _keep(self, value: str) -> bool:
        """What was read, as a key or as the value of one. False: no call comes of it. Once a call is told, it does
        not matter."""
        is_key = self._at is _At.KEY_TEXT
        self._at = _At.COLON if is_key else _At.AFTER_VALUE
        if self._is_told:
            self._key = ""
            return True
        if is_key:
            key = _try_text(value)
            self._key = key or ""
            return key is not None and (not self._is_bare or key in _BARE_KEYS)
        if self._key == "name":
            self._name = _try_text(value)
            return self._name in self._tool_names
        if self._key in _ARGUMENTS_KEYS:
            self._arguments = _try_arguments(value)
            return self._arguments is not None
        return True

    def _end_object(self, position: int, events: list[AnswerEvent]) -> int:
        if not self._is_told:
            if self._name is None or (self._arguments is None and self._is_bare):
                return self._stop(position, events)
            self._tell_name(self._name, events)
            events.append(ToolArguments(self.next_index, self._arguments or "{}"))
        self._end_call(events)
        if self._in_list:
            self._at = _At.AFTER_OBJECT
        else:
            self.state = Reading.DONE
        return position + 1

    def _tell_name(self, name: str, events: list[AnswerEvent]) -> None:
        self._is_told = self.has_told = True
        events.append(ToolCallBegan(self.next_index, name))

    def _end_call(self, events: list[AnswerEvent]) -> None:
        events.append(ToolCallEnded(self.next_index))
        self.next_index += 1

    def _stop(self, position: int, events: list[AnswerEvent]) -> int:
        """Here the text is no longer that of a call."""
        if self._is_told and self._at is not _At.AFTER_OBJECT:
            self._end_call(events)
        self.state = Reading.DONE if self._is_told else Reading.NO_CALL
        return position


class NamedCallReader:
    """`NAME[ARGS]{…}`; between the two some models have an id of the call, `[CALL_ID]…`."""

    def __init__(self, tool_names: frozenset[str], first_index: int) -> None:
        self.state = Reading.GOING_ON
        self.next_index = first_index
        self.has_told = False
        self._tool_names = tool_names
        self._scanner: ValueScanner | None = None

    def held(self) -> str:
        return ""

    def read(self, text: str, start: int, events: list[AnswerEvent]) -> int:
        if self._scanner is None:
            start = self._read_header(text, start, events)
        if self._scanner is None or start == len(text):
            return start
        end = self._scanner.advance(text, start, len(text))
        events.append(ToolArguments(self.next_index, text[start:end]))
        if self._scanner.is_complete:
            events.append(ToolCallEnded(self.next_index))
            self.next_index += 1
            self.state = Reading.DONE
        return end

    def _read_header(self, text: str, start: int, events: list[AnswerEvent]) -> int:
        """It is read as a whole, so that what is none can be looked through for markers."""
        limit = start + _MAX_HEADER_CHARS
        brace = text.find("{", start, limit)
        if brace >= 0:
            header = _HEADER.fullmatch(text, start, brace)
            if header is not None and header.group(1) in self._tool_names:
                events.append(ToolCallBegan(self.next_index, header.group(1)))
                self.has_told = True
                self._scanner = ValueScanner()
                return brace
            self.state = Reading.NO_CALL
        elif len(text) >= limit or not _HEADER_CHARS.fullmatch(text, start):
            self.state = Reading.NO_CALL
        return start


def _try_text(value: str) -> str | None:
    """Of a JSON string; models write line breaks into them."""
    try:
        text = json.loads(value, strict=False)
    except ValueError:
        return None
    return text if isinstance(text, str) else None


def _try_arguments(value: str) -> str | None:
    """An object as it was written; one in a string, unpacked; of null an empty one."""
    if value.startswith("{"):
        return value
    if value == "null":
        return "{}"
    text = _try_text(value)
    try:
        return text if text is not None and isinstance(json.loads(text, strict=False), dict) else None
    except (ValueError, RecursionError):
        return None

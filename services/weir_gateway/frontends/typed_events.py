"""Server-sent events that name their type, as OpenAI's Responses API and Anthropic's have them."""

from collections.abc import Sequence
from json.encoder import encode_basestring

from weir_gateway.frontends.json_parts import dump, dump_in_parts
from weir_gateway.frontends.openai.render import Json

_TEXT_PLACE, _NUMBER_PLACE = "\ufdd0", "\ufdd1"  # noncharacters, which are in nobody's names


def typed_event(data: Json) -> bytes:
    """The event's name is the `type` of `data`."""
    return _render(data["type"], dump(data)).encode()


def typed_events(events: Sequence[Json]) -> bytes:
    """In parts: to be called in a thread where there is much of it."""
    return "".join(_render(data["type"], dump_in_parts(data)) for data in events).encode()


class TextEvents:
    """Events that differ in their text, and perhaps a number, alone: what is around these is rendered once."""

    def __init__(self, example: Json) -> None:
        """`example` has `TextEvents.TEXT` where the text goes, and perhaps after `TextEvents.NUMBER` for the number."""
        head, _, self._tail = _render(example["type"], dump(example)).partition(dump(self.TEXT))
        self._head, _, self._middle = head.partition(dump(self.NUMBER))
        self._has_number = self._head != head

    TEXT = _TEXT_PLACE
    NUMBER = _NUMBER_PLACE

    def event(self, text: str, number: int = 0) -> bytes:
        shown = number if self._has_number else ""
        return f"{self._head}{shown}{self._middle}{encode_basestring(text)}{self._tail}".encode()


def _render(name: str, data: str) -> str:
    return f"event: {name}\ndata: {data}\n\n"

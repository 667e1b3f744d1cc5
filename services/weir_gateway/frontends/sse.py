"""Server-sent events of an answer."""

from collections.abc import Sequence
from json.encoder import encode_basestring

from weir_gateway.answers.events import AnswerEvent, ContentText
from weir_gateway.frontends.json_parts import dump, dump_in_parts
from weir_gateway.frontends.openai.render import AnswerRenderer, Json
from weir_gateway.requests.output import OutputDelta

DONE = b"data: [DONE]\n\n"

_PLACE = "\ufdd0"  # a noncharacter: no name of a model has it, and where it is the text goes


def event(data: Json, event_id: str = "") -> bytes:
    """One event."""
    return _head(event_id) + b"data: " + dump(data).encode() + b"\n\n"


def events_in_parts(chunks: Sequence[Json]) -> bytes:
    """The same of each. To be called in a thread where there is much of them."""
    return "".join(f"data: {dump_in_parts(chunk)}\n\n" for chunk in chunks).encode()


class ChunkEvents:
    """The chunks of one answer. Most differ in nothing but their text, which is put into what is rendered once."""

    def __init__(self, renderer: AnswerRenderer) -> None:
        self._renderer = renderer
        self._around_text: dict[int, tuple[str, str]] = {}
        """By choice."""

    def event(self, delta: OutputDelta, text_offset: int, event_id: str = "") -> bytes:
        """`text_offset`: characters of the choice before it."""
        has_more = delta.logprobs or delta.finish_reason is not None or not self._renderer.rendering.has_plain_chunks
        text = delta.text if delta.events is None else _text_alone(delta.events)
        if has_more or not text:
            return event(self._renderer.chunk(delta, text_offset), event_id)
        around = self._around_text.get(delta.choice)
        if around is None:
            around = self._around_text[delta.choice] = self._split(delta.choice)
        before, after = around
        return _head(event_id) + f"{before}{encode_basestring(text)}{after}".encode()

    def _split(self, choice: int) -> tuple[str, str]:
        chunk = self._renderer.chunk(OutputDelta(0, text=_PLACE, choice=choice), 0)
        before, _, after = dump(chunk).partition(dump(_PLACE))
        return f"data: {before}", f"{after}\n\n"


def _text_alone(events: Sequence[AnswerEvent]) -> str:
    """Of what is nothing but content; else empty."""
    texts = [event.text for event in events if isinstance(event, ContentText)]
    return "".join(texts) if len(texts) == len(events) else ""


def _head(event_id: str) -> bytes:
    return f"id: {event_id}\n".encode() if event_id else b""

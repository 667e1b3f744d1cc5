"""The content of an answer in Anthropic's form: blocks of text, of thinking and of calls of tools, in the order of the
answer."""

from collections.abc import Sequence

from pydantic_core import from_json

from weir_gateway.answers.events import (
    AnswerEvent,
    ContentText,
    ReasoningText,
    ToolArguments,
    ToolCallBegan,
    ToolCallEnded,
)
from weir_gateway.frontends.openai.render import Json
from weir_gateway.frontends.typed_events import typed_event, typed_events
from weir_gateway.tools.call_ids import CallIds


def content_blocks(events: Sequence[AnswerEvent], ids: CallIds) -> list[Json]:
    """Of a whole answer; without anything one empty text. A call that is cut off has what of its input is whole, as
    Anthropic's clients make it of a stream."""
    blocks: list[Json] = []
    calls: list[tuple[Json, list[str]]] = []
    """Each with the texts of its arguments."""
    for event in events:
        match event:
            case ContentText(text) if blocks and blocks[-1]["type"] == "text":
                blocks[-1]["text"] += text
            case ContentText(text):
                blocks.append({"type": "text", "text": text})
            case ReasoningText(text) if blocks and blocks[-1]["type"] == "thinking":
                blocks[-1]["thinking"] += text
            case ReasoningText(text):
                blocks.append(_thinking(text))
            case ToolCallBegan(index, name):
                blocks.append({"type": "tool_use", "id": ids.of(index), "name": name, "input": {}})
                calls.append((blocks[-1], []))
            case ToolArguments(index, text):
                calls[index][1].append(text)
    for block, texts in calls:
        block["input"] = _input_of("".join(texts) or "{}")
    return blocks or [{"type": "text", "text": ""}]


class BlockEvents:
    """The events of the blocks of one stream, of which at most one is open."""

    def __init__(self, ids: CallIds) -> None:
        self._ids = ids
        self._num_begun = 0
        self._open = ""
        """The type of the block that is open; empty: none is."""

    def events(self, events: Sequence[AnswerEvent]) -> bytes:
        return b"".join(map(self._event, events))

    def closing(self) -> bytes:
        """Ends the block that is open; of an answer without any there is an empty one."""
        begun = b"" if self._num_begun else self._begin({"type": "text", "text": ""})
        return begun + self._end()

    def _event(self, event: AnswerEvent) -> bytes:
        match event:
            case ContentText(text):
                begun = b"" if self._open == "text" else self._begin({"type": "text", "text": ""})
                return begun + self._delta({"type": "text_delta", "text": text})
            case ReasoningText(text):
                begun = b"" if self._open == "thinking" else self._begin(_thinking(""))
                return begun + self._delta({"type": "thinking_delta", "thinking": text})
            case ToolCallBegan(index, name):
                return self._begin({"type": "tool_use", "id": self._ids.of(index), "name": name, "input": {}})
            case ToolArguments(_, text):
                return self._delta({"type": "input_json_delta", "partial_json": text})
            case ToolCallEnded():
                return self._end()

    def _begin(self, block: Json) -> bytes:
        ended = self._end()
        self._open = block["type"]
        self._num_begun += 1
        begun = {"type": "content_block_start", "index": self._num_begun - 1, "content_block": block}
        return ended + typed_event(begun)

    def _delta(self, delta: Json) -> bytes:
        return typed_event({"type": "content_block_delta", "index": self._num_begun - 1, "delta": delta})

    def _end(self) -> bytes:
        was_open, self._open = self._open, ""
        return typed_events([{"type": "content_block_stop", "index": self._num_begun - 1}] if was_open else [])


def _input_of(arguments: str) -> Json:
    """Arguments that no grammar held may be no JSON: then they are there as the model wrote them."""
    try:
        found = from_json(arguments, allow_partial=True)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"arguments": arguments}


def _thinking(text: str) -> Json:
    """Nobody signs it here: whoever sends it back is believed."""
    return {"type": "thinking", "thinking": text, "signature": ""}

"""What an answer of OpenAI's Responses API is made of: at most one message, and calls of functions, each an item with a
place of its own in the output."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weir_gateway.answers.events import AnswerEvent, ContentText, ToolArguments, ToolCallBegan, ToolCallEnded
from weir_gateway.frontends.function_tools import arguments_of
from weir_gateway.frontends.openai.messages import Turn, call_turn
from weir_gateway.frontends.openai.parts import Json
from weir_gateway.tools.call_ids import CallIds


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """One item. `arguments`: those that there are."""

    output_index: int
    call_id: str
    name: str
    arguments: str = ""
    is_complete: bool = False

    @property
    def item_id(self) -> str:
        return f"fc_{self.call_id.removeprefix('call_')}"

    def json(self, status: str) -> Json:
        return {
            "id": self.item_id,
            "type": "function_call",
            "status": status,
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.arguments,
        }

    def ended_json(self) -> Json:
        return self.json("completed" if self.is_complete else "incomplete")


class AnswerItems:
    """Grows with the answer. Items are in the order in which they began."""

    def __init__(self, ids: CallIds, *, has_message: bool) -> None:
        """`has_message`: there is one whatever comes, and it is the first item."""
        self._ids = ids
        self._texts: list[str] = []
        self.message_index: int | None = 0 if has_message else None
        """Its place in the output. None: there is none yet."""
        self.calls: list[FunctionCall] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def num_items(self) -> int:
        return len(self.calls) + (self.message_index is not None)

    def add_text(self, text: str) -> None:
        if text and self.message_index is None:
            self.message_index = self.num_items
        self._texts.append(text)

    def take(self, event: AnswerEvent) -> FunctionCall | None:
        """The call that it was of, as it is now."""
        match event:
            case ContentText(text):
                self.add_text(text)
                return None
            case ToolCallBegan(index, name):
                self.calls.append(FunctionCall(self.num_items, self._ids.of(index), name))
            case ToolArguments(index, text):
                self.calls[index] = replace(self.calls[index], arguments=self.calls[index].arguments + text)
            case ToolCallEnded(index):
                self.calls[index] = replace(self.calls[index], is_complete=True)
            case _:
                return None
        return self.calls[event.index]

    def need_item(self) -> None:
        """An answer has one at least: an empty message, where there is nothing."""
        if not self.num_items:
            self.message_index = 0


def turn_of(text: str, calls: Sequence[FunctionCall]) -> Turn:
    """An answer as what a later request goes on from. Arguments that are no object are not told of."""
    called = [
        call_turn(call.call_id, call.name, arguments_of(call.arguments, "arguments", []))
        for call in calls
        if call.is_complete
    ]
    return {"role": "assistant", "content": text} | ({"tool_calls": called} if called else {})

"""What an answer of OpenAI's Responses API is made of: at most one message, calls of functions and reasoning, each an
item with a place of its own in the output."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weir_gateway.answers.events import (
    AnswerEvent,
    ContentText,
    ReasoningText,
    ToolArguments,
    ToolCallBegan,
    ToolCallEnded,
)
from weir_gateway.frontends.bodies.function_tools import arguments_of
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


@dataclass(frozen=True, slots=True)
class Reasoning:
    """One item: what the model thought without a break."""

    output_index: int
    item_id: str
    text: str = ""

    def json(self, status: str) -> Json:
        parts = [self.part] if self.text else []
        return {"id": self.item_id, "type": "reasoning", "status": status, "summary": [], "content": parts}

    @property
    def part(self) -> Json:
        return {"type": "reasoning_text", "text": self.text}


class AnswerItems:
    """Grows with the answer. Items are in the order in which they began."""

    def __init__(self, ids: CallIds, *, has_message: bool) -> None:
        """`has_message`: there is one whatever comes, and it is the first item."""
        self._ids = ids
        self._texts: list[str] = []
        self.message_index: int | None = 0 if has_message else None
        """Its place in the output. None: there is none yet."""
        self.calls: list[FunctionCall] = []
        self.reasonings: list[Reasoning] = []
        self._is_reasoning = False

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def num_items(self) -> int:
        return len(self.calls) + len(self.reasonings) + (self.message_index is not None)

    @property
    def open_reasoning(self) -> Reasoning | None:
        """The item that more reasoning would belong to."""
        return self.reasonings[-1] if self._is_reasoning else None

    def add_reasoning(self, text: str) -> Reasoning:
        """The item, as it is now."""
        if not self._is_reasoning:
            name = f"rs_{self._ids.request_id}_{len(self.reasonings)}"
            self.reasonings.append(Reasoning(self.num_items, name))
        self._is_reasoning = True
        self.reasonings[-1] = replace(self.reasonings[-1], text=self.reasonings[-1].text + text)
        return self.reasonings[-1]

    def add_text(self, text: str) -> None:
        if text and self.message_index is None:
            self.message_index = self.num_items
        self._texts.append(text)

    def take(self, event: AnswerEvent) -> FunctionCall | None:
        """The call that it was of, as it is now."""
        if isinstance(event, ReasoningText):
            self.add_reasoning(event.text)
            return None
        self._is_reasoning = False
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
        return self.calls[event.index]

    def need_item(self) -> None:
        """An answer has one at least: an empty message, where there is nothing."""
        if not self.num_items:
            self.message_index = 0


def turn_of(text: str, calls: Sequence[FunctionCall], reasonings: Sequence[Reasoning] = ()) -> Turn:
    """An answer as what a later request goes on from. Arguments that are no object are not told of; what becomes of
    thoughts is the template's to decide."""
    thoughts = "".join(reasoning.text for reasoning in reasonings)
    called = [
        call_turn(call.call_id, call.name, arguments_of(call.arguments, "arguments", []))
        for call in calls
        if call.is_complete
    ]
    turn: Turn = {"role": "assistant", "content": text} | ({"tool_calls": called} if called else {})
    return turn | ({"reasoning_content": thoughts} if thoughts else {})

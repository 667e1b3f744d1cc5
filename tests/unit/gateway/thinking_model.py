"""The model of bytes, with markers of reasoning and of calls that are tokens of their own, and a template that opens or
closes the reasoning as Qwen3's does."""

import codecs
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from tests.unit.gateway.fake_model import ByteTokenizer, LineTemplate, byte_model

from weir_gateway.answers.formats import HERMES, THINK, AnswerFormat
from weir_gateway.requests.models import ServedModel

EOS, OPENS, CLOSES, CALL = 256, 257, 258, 259
SPELLED = {EOS: "<end>", OPENS: "<think>", CLOSES: "</think>", CALL: "<tool_call>"}
VOCAB_SIZE = 260
_MARKER = re.compile("(<think>|</think>|<tool_call>)")


class ThinkingDetokenizer:
    def __init__(self, shown: frozenset[int]) -> None:
        self._shown = shown
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        spelled = (spell(token_id) for token_id in token_ids if token_id < EOS or token_id in self._shown)
        return self._decoder.decode(b"".join(spelled))

    def finish(self) -> str:
        return self._decoder.decode(b"", True)


class ThinkingTokenizer(ByteTokenizer):
    added_token_ids = frozenset(SPELLED)

    def encode(self, text: str, *, add_bos: bool = True, field: str = "prompt") -> list[int]:
        del add_bos, field
        return tokens_of(text)

    def detokenizer(self, *, shown: frozenset[int] = frozenset()) -> Any:
        return ThinkingDetokenizer(shown)

    def token_bytes(self, token_id: int) -> bytes:
        return spell(token_id)


class ThinkingTemplate(LineTemplate):
    """`enable_thinking` false closes the reasoning in the prompt, `opens` opens it; else it is the model's to begin."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, object] = MappingProxyType({}),
    ) -> str:
        text = super().render(
            [{**message, "content": _with_thoughts(message)} for message in messages],
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        if continue_final_message or not add_generation_prompt:
            return text
        if variables.get("enable_thinking") is False:
            return text + "<think>\n\n</think>\n\n"
        return text + "<think>\n" if variables.get("opens") else text


def _with_thoughts(message: Mapping[str, Any]) -> str:
    thoughts = message.get("reasoning_content")
    return f"({thoughts}) {message['content']}" if thoughts else message["content"]


def spell(token_id: int) -> bytes:
    return SPELLED[token_id].encode() if token_id >= EOS else bytes([token_id])


def tokens_of(text: str) -> list[int]:
    ids = {spelled: token_id for token_id, spelled in SPELLED.items()}
    return [token_id for part in _MARKER.split(text) for token_id in ([ids[part]] if part in ids else part.encode())]


def thinking_model() -> ServedModel:
    """`marker` tokens and all."""
    return replace(
        byte_model(ThinkingTokenizer()),
        vocab_size=VOCAB_SIZE,
        chat_template=ThinkingTemplate(),
        answer_format=AnswerFormat(THINK, HERMES),
    )

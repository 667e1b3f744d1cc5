"""A model of bytes: token i is byte i, and there is an end token. Small enough to read the tests' texts off the ids."""

import codecs
import json
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from weir.core.errors import FieldViolation, InvalidRequest
from weir_gateway.answers.formats import HERMES, AnswerFormat
from weir_gateway.requests.models import ServedModel

EOS = 256
VOCAB_SIZE = 257
MAX_CONTEXT = 512


class ByteDetokenizer:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(bytes(token_id for token_id in token_ids if token_id < EOS))

    def finish(self) -> str:
        return self._decoder.decode(b"", True)


class ByteTokenizer:
    added_token_ids = frozenset({EOS})

    def __init__(self) -> None:
        self.num_encoded = 0
        self.encoded_with_special: list[bool] = []
        self.thread_names: set[str] = set()
        self.may_threads_encode = threading.Event()
        """While it is cleared, texts that are encoded beside the event loop come to no end."""
        self.may_threads_encode.set()

    def encode(self, text: str, *, add_bos: bool = True, field: str = "prompt") -> list[int]:
        self.num_encoded += 1
        self.encoded_with_special.append(add_bos)
        self.thread_names.add(threading.current_thread().name)
        if threading.current_thread() is not threading.main_thread():
            self.may_threads_encode.wait(20)
        try:
            return list(text.encode())
        except UnicodeEncodeError:
            raise InvalidRequest([FieldViolation(field, "is not valid Unicode")]) from None

    def detokenizer(self, *, shown: frozenset[int] = frozenset()) -> ByteDetokenizer:
        return ByteDetokenizer()

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        self.thread_names.add(threading.current_thread().name)
        shown = (token_id for token_id in token_ids if not skip_special or token_id < EOS)
        return b"".join(map(self.token_bytes, shown)).decode("utf-8", "replace")

    def token_spelling(self, token_id: int) -> str:
        return f"<{token_id}>"

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < EOS else b"<end>"


class LineTemplate:
    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, object] = MappingProxyType({}),
    ) -> str:
        """Ends with nothing where it asks for an answer, as other tests have it, and with "." where it does not. Begins
        with the variables and the names of tools; a turn has its calls after its content."""
        head = "".join(f"{name}={value}\n" for name, value in variables.items())
        head += "".join(f"tool: {tool['function']['name']}\n" for tool in tools)
        text = head + "".join(f"{message['role']}: {message['content']}{_calls_of(message)}\n" for message in messages)
        if continue_final_message:
            return text.removesuffix("\n")
        return text if add_generation_prompt else text + "."


def _calls_of(message: Mapping[str, Any]) -> str:
    return "".join(
        f" {call['function']['name']}({json.dumps(call['function']['arguments'])})"
        for call in message.get("tool_calls", ())
    )


def byte_model(tokenizer: ByteTokenizer | None = None, *, max_context: int = MAX_CONTEXT) -> ServedModel:
    """It calls tools in Hermes' form."""
    return ServedModel(
        "bytes",
        max_context,
        VOCAB_SIZE,
        (EOS,),
        tokenizer or ByteTokenizer(),
        LineTemplate(),
        answer_format=AnswerFormat(tools=HERMES),
    )


def ids_of(text: str) -> list[int]:
    return list(text.encode())

"""A model of bytes: token i is byte i, and there is an end token. Small enough to read the tests' texts off the ids."""

import codecs
from collections.abc import Mapping, Sequence

from weir.core.errors import FieldViolation, InvalidRequest
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
    def __init__(self) -> None:
        self.num_encoded = 0

    def encode(self, text: str, *, add_bos: bool = True, field: str = "prompt") -> list[int]:
        del add_bos
        self.num_encoded += 1
        try:
            return list(text.encode())
        except UnicodeEncodeError:
            raise InvalidRequest([FieldViolation(field, "is not valid Unicode")]) from None

    def detokenizer(self) -> ByteDetokenizer:
        return ByteDetokenizer()

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < EOS else b"<end>"


class LineTemplate:
    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages)


def byte_model(tokenizer: ByteTokenizer | None = None, *, max_context: int = MAX_CONTEXT) -> ServedModel:
    return ServedModel("bytes", max_context, VOCAB_SIZE, (EOS,), tokenizer or ByteTokenizer(), LineTemplate())


def ids_of(text: str) -> list[int]:
    return list(text.encode())

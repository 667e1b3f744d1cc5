"""The tokens of a GGUF file and what kind each is."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weir.model.errors import ModelError
from weir.model.files.gguf import GgufFile


class TokenType(enum.IntEnum):
    """`tokenizer.ggml.token_type`, those that matter here."""

    NORMAL = 1
    CONTROL = 3
    USER_DEFINED = 4


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens by id, as many types, and ids by token."""

    path: Path
    tokens: list[str]
    types: list[int]
    id_of: Mapping[str, int]

    def of_type(self, kind: TokenType) -> list[str]:
        return [token for token, found in zip(self.tokens, self.types, strict=True) if found == kind]

    def token(self, key: str, token_id: int) -> str:
        """Raises ModelError, naming the metadata `key` that has the id, if there is no such token."""
        if not 0 <= token_id < len(self.tokens):
            raise ModelError(f"{self.path}: {key} is {token_id}, past {len(self.tokens)} tokens")
        return self.tokens[token_id]


def read_vocabulary(gguf: GgufFile) -> Vocabulary:
    """Raises ModelError: tokens are missing, occur twice, or do not fit their types."""
    tokens = strings(gguf, "tokenizer.ggml.tokens")
    id_of = {token: token_id for token_id, token in enumerate(tokens)}
    if len(id_of) != len(tokens):
        raise ModelError(f"{gguf.path}: tokenizer.ggml.tokens has {len(tokens) - len(id_of)} repeated entries")
    types = gguf.find("tokenizer.ggml.token_type", list) or [TokenType.NORMAL] * len(tokens)
    if len(types) != len(tokens) or not all(isinstance(kind, int) for kind in types):
        raise ModelError(
            f"{gguf.path}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens, "
            "expected as many integers"
        )
    return Vocabulary(gguf.path, tokens, types, id_of)


def strings(gguf: GgufFile, key: str) -> list[str]:
    """Raises ModelError if `key` is missing or has anything but text."""
    values = gguf.get(key, list)
    if not all(isinstance(value, str) for value in values):
        raise ModelError(f"{gguf.path}: {key} has entries that are not text")
    return values

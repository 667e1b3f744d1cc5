"""Which bytes a token of the vocabulary stands for."""

import re
from typing import Protocol

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE_MARK = "\u2581"
_NO_LATIN_1 = 0x100
"""Instead of characters that stand for no byte."""


class TokenDecoder(Protocol):
    """From a token of the vocabulary, as its file writes it, to bytes."""

    @property
    def strips_leading_space(self) -> bool:
        """Whether the first space of a text was put there by the tokenizer."""
        ...

    def bytes_of(self, token: str) -> bytes: ...


def byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other 68 bytes for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class ByteLevelDecoder:
    """Each character of a token is one byte; a token with any other character (an added one) stands for its text."""

    strips_leading_space = False

    def __init__(self) -> None:
        no_byte = dict.fromkeys(range(0x100), _NO_LATIN_1)
        self._latin_1_of = no_byte | {ord(character): byte for character, byte in byte_of_character().items()}

    def bytes_of(self, token: str) -> bytes:
        try:
            return token.translate(self._latin_1_of).encode("latin-1")
        except UnicodeEncodeError:
            return token.encode()


class ByteFallbackDecoder:
    """SentencePiece: text with U+2581 for a space, and `<0x0A>` for single bytes."""

    def __init__(self, *, strips_leading_space: bool) -> None:
        self.strips_leading_space = strips_leading_space

    def bytes_of(self, token: str) -> bytes:
        match = _BYTE_TOKEN.fullmatch(token)
        if match is not None:
            return bytes([int(match.group(1), 16)])
        return token.replace(SPACE_MARK, " ").encode()

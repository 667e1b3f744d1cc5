"""A model's vocabulary as grammars see it."""

from collections.abc import Sequence
from typing import Protocol

from weir.core.errors import InvalidRequest
from weir.grammar.protocol import Vocabulary

_MAX_TOKEN_BYTES = 64


class TokensOfTexts(Protocol):
    """The part of `weir.model.tokens.tokenizer.Tokenizer` that is needed."""

    @property
    def added_token_ids(self) -> frozenset[int]: ...

    def encode(self, text: str, *, add_bos: bool = True, field: str = "prompt") -> list[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...


def vocabulary_of(tokenizer: TokensOfTexts, vocab_size: int, end_token_ids: Sequence[int]) -> Vocabulary:
    """`vocab_size`: of the logits, which may be more than the tokenizer has. Reads every token, which takes a while.

    Of a text that only other tokens than its own spell (with a space before it, or a special token written out in it)
    `encode` gives the tokens of its bytes.
    """
    token_bytes = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
    added = tokenizer.added_token_ids
    id_of = {spelled: token_id for token_id, spelled in enumerate(token_bytes) if spelled and token_id not in added}

    def encode(text: str) -> list[int]:
        data = text.encode("utf-8", "replace")
        try:
            token_ids = tokenizer.encode(text, add_bos=False)
        except InvalidRequest:
            token_ids = []
        is_plain = added.isdisjoint(token_ids) and all(token_id < vocab_size for token_id in token_ids)
        if is_plain and b"".join(token_bytes[token_id] for token_id in token_ids) == data:
            return token_ids
        return _longest_tokens(data, id_of)

    return Vocabulary(token_bytes, added, tuple(end_token_ids), encode)


def _longest_tokens(data: bytes, id_of: dict[bytes, int]) -> list[int]:
    """At each place the longest token that is there; up to a byte that no token spells."""
    token_ids, start = list[int](), 0
    while start < len(data):
        ends = range(min(len(data), start + _MAX_TOKEN_BYTES), start, -1)
        end = next((end for end in ends if data[start:end] in id_of), None)
        if end is None:
            break
        token_ids.append(id_of[data[start:end]])
        start = end
    return token_ids

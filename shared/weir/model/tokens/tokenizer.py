"""Text to token ids and back.

Ids become text through bytes: every token stands for some bytes, and the bytes of a sequence are decoded as UTF-8 with
U+FFFD for what is not UTF-8. That is what makes detokenizing one token at a time exact.
"""

import codecs
import json
import string
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import tokenizers

from weir.core.errors import FieldViolation, InvalidRequest
from weir.model.errors import ModelError
from weir.model.files.config import load_model_config
from weir.model.files.gguf import read_gguf
from weir.model.files.source import ModelKind, ModelSource
from weir.model.tokens.decoders import ByteFallbackDecoder, ByteLevelDecoder, TokenDecoder, byte_of_character
from weir.model.tokens.gguf import tokenizer_from_gguf

MAX_CHARS_AT_ONCE = 2048
"""Longer texts are encoded so that other threads go on meanwhile."""
_PROBE = "ab \u00e9 1\n\U0010fffd"
"""A text with what no vocabulary has: where that cannot be read, it is known before somebody's request has it."""
_DUMMY_SPACE = "\u0120"  # in GPT-2's alphabet


class IncrementalDetokenizer:
    """Turns a growing sequence of ids into text, one piece at a time, never half a character.

    The pieces joined equal `Tokenizer.decode` of all ids, however the ids were cut into pushes.
    """

    def __init__(self, tokenizer: "Tokenizer", skip_special: bool, shown: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._shown = shown
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip_space = tokenizer.strips_leading_space

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that is certain after these ids."""
        return self._emit(self._tokenizer.decode_bytes(token_ids, self._skip_special, self._shown), final=False)

    def finish(self) -> str:
        """What is left: U+FFFD for a character that was never completed. The next push starts a new text."""
        text = self._emit(b"", final=True)
        self._utf8.reset()
        self._strip_space = self._tokenizer.strips_leading_space
        return text

    def _emit(self, data: bytes, final: bool) -> str:
        text = self._utf8.decode(data, final)
        if self._strip_space and text:
            self._strip_space = False
            return text.removeprefix(" ")
        return text


class _TokenBytes(dict[int, bytes]):
    """What tokens stand for, by id; filled as ids come by, with at most one entry a token of the vocabulary."""

    def __init__(self, bytes_of: Callable[[int], bytes | None]) -> None:
        """`bytes_of`: None for an id past the vocabulary, of which there are too many to keep."""
        super().__init__()
        self._bytes_of = bytes_of

    def __missing__(self, token_id: int) -> bytes:
        found = self._bytes_of(token_id)
        if found is None:
            return b""
        self[token_id] = found
        return found


class Tokenizer:
    """Of one model. Safe to share between threads once loaded."""

    def __init__(self, backend: tokenizers.Tokenizer, decoder: TokenDecoder, special_ids: frozenset[int]) -> None:
        self.added_token_ids = frozenset(backend.get_added_tokens_decoder())
        """Those that are found in texts before anything else, the special ones among them."""
        self._backend = backend
        self._decoder = decoder
        self._all_bytes = _TokenBytes(self._find_bytes)
        self._bytes_without_special = _TokenBytes(
            lambda token_id: b"" if token_id in special_ids else self._find_bytes(token_id)
        )

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def strips_leading_space(self) -> bool:
        return self._decoder.strips_leading_space

    def encode(self, text: str, *, add_bos: bool = True, field: str = "prompt") -> list[int]:
        """Special tokens written out in the text are recognised. Bytes that the vocabulary has no token for are left
        out, as the model was trained: a text may come to no tokens at all.

        Args:
            add_bos: start with the model's beginning-of-sequence token if the model wants one. A rendered chat
                template writes that token itself: say False there.
            field: what the request calls this text.

        Raises:
            InvalidRequest: the text has a lone surrogate, so it is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            problem = f"character {error.start} is a lone surrogate ({text[error.start]!a}), which is not valid Unicode"
            raise InvalidRequest([FieldViolation(field, problem)]) from error
        try:
            if len(text) <= MAX_CHARS_AT_ONCE:
                return self._backend.encode(text, add_special_tokens=add_bos).ids
            # `encode` keeps other threads from running until it is done; a batch of one does not, but wakes threads
            return self._backend.encode_batch_fast([text], add_special_tokens=add_bos)[0].ids
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # of any class: the library panics where a file is odd
            problem = f"the model's tokenizer cannot read it ({error})"
            raise InvalidRequest([FieldViolation(field, problem)]) from error

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Ids past the vocabulary stand for nothing."""
        detokenizer = self.detokenizer(skip_special=skip_special)
        return detokenizer.push(token_ids) + detokenizer.finish()

    def detokenizer(self, *, skip_special: bool = True, shown: frozenset[int] = frozenset()) -> IncrementalDetokenizer:
        """`shown`: special tokens that are in the text all the same."""
        return IncrementalDetokenizer(self, skip_special, shown)

    def decode_bytes(self, token_ids: Iterable[int], skip_special: bool, shown: frozenset[int] = frozenset()) -> bytes:
        """The bytes of the tokens, one after the other."""
        bytes_of = self._bytes_without_special if skip_special else self._all_bytes
        if shown:
            all_bytes = self._all_bytes
            return b"".join([(all_bytes if token_id in shown else bytes_of)[token_id] for token_id in token_ids])
        return b"".join([bytes_of[token_id] for token_id in token_ids])

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, special ones too; a token can be a part of a character."""
        return self._all_bytes[token_id]

    def token_spelling(self, token_id: int) -> str:
        """How the vocabulary writes a token, as `\u0120the` for ` the`; of an id past the vocabulary nothing."""
        return self._backend.id_to_token(token_id) or ""

    def _find_bytes(self, token_id: int) -> bytes | None:
        token = self._backend.id_to_token(token_id)
        return None if token is None else self._decoder.bytes_of(token)


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """From the GGUF file's own metadata, or the folder's tokenizer.json; for dummy weights, one of bytes.

    Raises:
        ModelError: no tokenizer there, or of a kind that Weir does not know.
    """
    if source.kind is ModelKind.GGUF:
        backend = tokenizer_from_gguf(read_gguf(source.path))
    elif source.kind is ModelKind.DUMMY:
        backend = _dummy_tokenizer(load_model_config(source).vocab_size)
    else:
        backend = _read_tokenizer_json(source.path / "tokenizer.json")
    added = backend.get_added_tokens_decoder()
    special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
    return Tokenizer(backend, _decoder_of(backend, source.path), special_ids)


def _dummy_tokenizer(vocab_size: int) -> tokenizers.Tokenizer:
    """Ids 0 to 255 are the bytes; the others, which only a model samples, are a space and a word of their own."""
    alphabet = byte_of_character()
    vocabulary = alphabet | {_DUMMY_SPACE + _dummy_word(number): number for number in range(len(alphabet), vocab_size)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def _dummy_word(number: int) -> str:
    letters = ""
    while number:
        number, rest = divmod(number, 26)
        letters += string.ascii_lowercase[rest]
    return letters


def _read_tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ModelError(f"{path}: no such file; a model folder needs the tokenizer in this form")
    try:
        backend = tokenizers.Tokenizer.from_buffer(path.read_bytes())
        backend.no_truncation()  # as transformers does: else a file of a training run cuts or fills every prompt
        backend.no_padding()
        backend.encode(_PROBE)
        return backend
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # of any class: the library panics over some files
        raise ModelError(f"{path}: not a tokenizer ({error})") from error


def _decoder_of(backend: tokenizers.Tokenizer, path: Path) -> TokenDecoder:
    """Read off the decoder: which of the two ways of writing bytes as tokens the vocabulary uses."""
    # the decoder's own state: written out with its 280,000 merges, Llama 3's tokenizer takes a second
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    parts = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    kinds = {part.get("type") for part in parts}
    if kinds == {"ByteLevel"}:
        return ByteLevelDecoder()
    if "ByteFallback" in kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return ByteFallbackDecoder(strips_leading_space="Strip" in kinds)
    found = "+".join(sorted(str(kind) for kind in kinds))
    raise ModelError(f"{path}: decoder {found}; Weir knows byte-level and byte-fallback vocabularies")

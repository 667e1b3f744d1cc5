"""What a predictor knows of each token of a vocabulary: a vector, and which of a few telling words and marks it is.

Pooling vectors and counting signs is all that is done with a prompt, so a prediction costs microseconds.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_PUNCTUATION = ("?", "\n", "```", '"', ":", ",", ".", "(")
_WORD_LINES = (
    "what who when where why how which is are can do does should tell me",
    "list write explain give create make compare describe summarize translate classify choose answer",
    "rewrite edit correct identify extract name names yes no one than all many each times more",
    "essay story poem email letter article blog script code function python table recipe plan",
    "steps step ideas tips best difference short brief briefly detail detailed detailing summary",
    "sentence sentences paragraph paragraphs words word",
)
_WORDS = tuple(word for line in _WORD_LINES for word in line.split())
SIGNS = (*_PUNCTUATION, *_WORDS)
NUM_PUNCTUATION = len(_PUNCTUATION)
UNIT_SIGNS = tuple(SIGNS.index(word) for word in ("words", "word", "sentences", "sentence", "paragraphs", "paragraph"))
"""A number right before one of these says how long the answer should be."""
_MAX_FRAME_TOKENS = 512
_LARGEST_NUMBER_DIGITS = 6


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """Tokens that a chat template writes: `prefix` and `suffix` around a conversation of one message, `before_answer`
    and `after_answer` around each earlier answer in a longer one (both empty: not known)."""

    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    before_answer: tuple[int, ...] = ()
    after_answer: tuple[int, ...] = ()

    def parts(self) -> tuple[tuple[int, ...], ...]:
        return self.prefix, self.suffix, self.before_answer, self.after_answer


NO_FRAME = ChatFrame()
_FRAME_PARTS = ("prefix", "suffix", "before_answer", "after_answer")


@dataclass(frozen=True)
class TokenTable:
    """`vectors` int8 [vocabulary, dims] times `scales` float32 [dims]; `sign_of` uint8 [vocabulary], 1 + the index in
    SIGNS, 0 for none; `number_of` int32 [vocabulary], the value of a token of digits alone, -1 for any other, and
    `digits_of` uint8, of how many digits. `frame` is what the chat template writes around messages.
    """

    tokenizer_digest: str
    vectors: npt.NDArray[np.int8]
    scales: npt.NDArray[np.float32]
    sign_of: npt.NDArray[np.uint8]
    number_of: npt.NDArray[np.int32]
    digits_of: npt.NDArray[np.uint8]
    frame: ChatFrame = NO_FRAME

    def __post_init__(self) -> None:
        rows, dims = self.vectors.shape
        wrong = [
            f"{name} is {array.dtype} {list(array.shape)}, expected {np.dtype(kind)} {list(shape)}"
            for name, array, kind, shape in (
                ("vectors", self.vectors, np.int8, (rows, dims)),
                ("scales", self.scales, np.float32, (dims,)),
                ("sign_of", self.sign_of, np.uint8, (rows,)),
                ("number_of", self.number_of, np.int32, (rows,)),
                ("digits_of", self.digits_of, np.uint8, (rows,)),
            )
            if array.dtype != kind or array.shape != shape
        ]
        if wrong:
            raise ValueError("; ".join(wrong))
        if rows and int(self.sign_of.max()) > len(SIGNS):
            raise ValueError(f"sign_of has {self.sign_of.max()}, at most {len(SIGNS)} is a sign")
        if max(len(part) for part in self.frame.parts()) > _MAX_FRAME_TOKENS:
            raise ValueError(f"the parts of a frame may have {_MAX_FRAME_TOKENS} tokens each at most")

    @property
    def vocab_size(self) -> int:
        return int(self.vectors.shape[0])

    @property
    def num_dims(self) -> int:
        return int(self.vectors.shape[1])

    @property
    def digest(self) -> str:
        """32 hex digits over all of it: features of two tables may be compared only if these are equal."""
        hashed = hashlib.blake2b(digest_size=16)
        hashed.update(repr((self.tokenizer_digest, self.frame.parts(), SIGNS)).encode())
        for array in (self.vectors, self.scales, self.sign_of, self.number_of, self.digits_of):
            hashed.update(np.ascontiguousarray(array).data)
        return hashed.hexdigest()

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """For a file."""
        parts = zip(_FRAME_PARTS, self.frame.parts(), strict=True)
        frame = {name: np.array(part, np.int32) for name, part in parts}
        names = ("vectors", "scales", "sign_of", "number_of", "digits_of")
        return frame | {name: getattr(self, name) for name in names}


def make_token_table(
    vectors: npt.NDArray[np.float32],
    token_bytes: Callable[[int], bytes],
    frame: ChatFrame = NO_FRAME,
) -> TokenTable:
    """`vectors` [vocabulary, dims] are rounded to 8 bits; `token_bytes`: of each token."""
    tokens = [token_bytes(token_id) for token_id in range(len(vectors))]
    scales = np.maximum(np.abs(vectors).max(axis=0), 1e-12).astype(np.float32) / 127
    signs = np.array([_sign_of(piece) for piece in tokens], np.uint8)
    numbers = [_number_of(piece) for piece in tokens]
    return TokenTable(
        tokenizer_digest=digest_of_tokens(tokens),
        vectors=np.rint(vectors / scales).astype(np.int8),
        scales=scales,
        sign_of=signs,
        number_of=np.array([number for number, _ in numbers], np.int32),
        digits_of=np.array([digits for _, digits in numbers], np.uint8),
        frame=_bounded(frame),
    )


def table_from_arrays(tokenizer_digest: str, arrays: Mapping[str, npt.NDArray[Any]]) -> TokenTable:
    """What `TokenTable.arrays` gave. Raises KeyError for one that is missing, ValueError for one of a wrong shape."""
    frame = ChatFrame(*(tuple(int(token) for token in arrays[name]) for name in _FRAME_PARTS))
    return TokenTable(
        tokenizer_digest,
        vectors=arrays["vectors"],
        scales=arrays["scales"],
        sign_of=arrays["sign_of"],
        number_of=arrays["number_of"],
        digits_of=arrays["digits_of"],
        frame=frame,
    )


def _bounded(frame: ChatFrame) -> ChatFrame:
    """What is left of a long frame still stands next to the message. An answer's is whole or not there."""
    turn = (frame.before_answer, frame.after_answer)
    if max(len(part) for part in turn) > _MAX_FRAME_TOKENS:
        turn = ((), ())
    return ChatFrame(frame.prefix[:_MAX_FRAME_TOKENS], frame.suffix[-_MAX_FRAME_TOKENS:], *turn)


def digest_of_tokens(tokens: Sequence[bytes]) -> str:
    """32 hex digits: equal for tokenizers whose tokens stand for the same bytes."""
    hashed = hashlib.blake2b(digest_size=16)
    for piece in tokens:
        hashed.update(len(piece).to_bytes(4, "little") + piece)
    return hashed.hexdigest()


def _sign_of(piece: bytes) -> int:
    text = piece.decode(errors="replace")
    word = text.strip().lower()
    if word in _SIGN_BY_TEXT:
        return _SIGN_BY_TEXT[word]
    if not word:
        return _SIGN_BY_TEXT["\n"] if "\n" in text else 0
    return next((1 + SIGNS.index(sign) for sign in ("```", "?") if sign in text), 0)


def _number_of(piece: bytes) -> tuple[int, int]:
    word = piece.strip()
    if 0 < len(word) <= _LARGEST_NUMBER_DIGITS and word.isdigit():
        return int(word), len(word)
    return -1, 0


_SIGN_BY_TEXT = {sign: index for index, sign in enumerate(SIGNS, start=1)}

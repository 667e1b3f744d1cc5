"""How much a JSON text may hold, counted before objects are made of it: of bodies, and of lines of batches."""

import re
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

MAX_CONTAINERS = 32_768
MAX_TEXTS = 131_072
MAX_VALUES = (1 << 20) + (1 << 16)
MAX_LONG_NUMBERS = 65_536
"""Of one JSON text, all together: objects and lists; texts, with the names of fields; entries of whatever kind, such as
token ids, of which a million and all other fields pass; numbers of more than 19 digits. While objects are made of them
no other thread runs: for a third of a microsecond to one each, and a tenth for a token id."""

_SHORT_BYTES = 64 << 10
"""What is no longer than that cannot hold anybody up."""
_PIECE_BYTES = 256 << 10
"""Of what keeps other threads from running while it is looked at; NumPy does not."""
_LONG_DIGITS = b"0" * 20
_GOES_ON = re.compile(rb"(?:(?<=\\)\\*.)?[0-9]*", re.DOTALL)
_TO_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)


def try_find_size_problem(raw: bytes) -> str | None:
    """What a JSON text has too many of, counted before an object is made of any; None: it may be read. Costs a few
    milliseconds for megabytes, in which other threads run."""
    if len(raw) <= _SHORT_BYTES or _try_find_too_many(raw, None) is None:
        return None
    # What is in texts does not count: without the escapes in them, each second quotation mark ends one.
    plain = raw if b"\\" not in raw else b"".join(map(_without_escapes, _pieces(raw)))
    return _try_find_too_many(plain, np.bitwise_xor.accumulate(_are(plain, b'"')))


def try_find_size_problem_of(text: str) -> str | None:
    """The same of one that is no bytes yet; of a short one none are made."""
    return None if len(text) <= _SHORT_BYTES else try_find_size_problem(text.encode("utf-8", "surrogatepass"))


def _try_find_too_many(raw: bytes, in_texts: NDArray[np.bool_] | None) -> str | None:
    """`in_texts`: which bytes are in a text, with the mark that begins it; None: none are."""

    def count(of: bytes) -> int:
        found = _are(raw, of)
        return int(np.count_nonzero(found if in_texts is None else found & ~in_texts))

    num_texts = int(np.count_nonzero(_are(raw, b'"'))) // 2
    found = (
        (num_texts, MAX_TEXTS, "texts"),
        (count(b"{") + count(b"["), MAX_CONTAINERS, "objects and lists"),
        (count(b","), MAX_VALUES, "values"),
    )
    for number, limit, of_what in found:
        if number > limit:
            return f"has more than {limit} {of_what}; send less at once"
    if len(raw) > MAX_LONG_NUMBERS * len(_LONG_DIGITS):
        outside = raw if in_texts is None else np.frombuffer(raw, np.uint8)[~in_texts].tobytes()
        num_long = sum(piece.translate(_TO_ZEROS).count(_LONG_DIGITS) for piece in _pieces(outside))
        if num_long > MAX_LONG_NUMBERS:
            return f"has more than {MAX_LONG_NUMBERS} numbers of 20 digits; send less at once"
    return None


def _are(raw: bytes, of: bytes) -> NDArray[np.bool_]:
    """Which bytes are this one."""
    found: NDArray[np.bool_] = np.frombuffer(raw, np.uint8) == of[0]
    return found


def _pieces(raw: bytes) -> Iterator[bytes]:
    """Cut where no escape begins, and no number goes on."""
    start = 0
    while start < len(raw):
        found = _GOES_ON.match(raw, min(start + _PIECE_BYTES, len(raw)))
        assert found is not None, "it matches nothing too"
        end = found.end()
        yield raw[start:end]
        start = end


def _without_escapes(piece: bytes) -> bytes:
    return piece.replace(rb"\\", b"").replace(rb"\"", b"")

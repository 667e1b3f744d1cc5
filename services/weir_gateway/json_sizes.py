"""How much a JSON text may hold, counted before objects are made of it: of bodies, and of lines of batches."""

MAX_CONTAINERS = 32_768
MAX_TEXTS = 131_072
MAX_VALUES = (1 << 20) + (1 << 16)
MAX_LONG_NUMBERS = 65_536
"""Of one JSON text, all together: objects and lists; texts, with the names of fields; entries of whatever kind, such as
token ids, of which a million and all other fields pass; numbers of more than 19 digits. While objects are made of them
no other thread runs: for a third of a microsecond to one each, and a tenth for a token id."""

_SHORT_BYTES = 64 << 10
"""What is no longer than that cannot hold anybody up."""
_LONG_DIGITS = b"0" * 20
_TO_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)


def try_find_size_problem(raw: bytes) -> str | None:
    """What a JSON text has too many of, counted before an object is made of any; None: it may be read. Costs a few
    milliseconds for megabytes."""
    if len(raw) <= _SHORT_BYTES or _try_find_too_many(raw, raw.count(b'"') // 2) is None:
        return None
    # What is in texts does not count: without the escapes in them, each second quotation mark ends one.
    plain = raw.replace(rb"\\", b"").replace(rb"\"", b"")
    num_texts = plain.count(b'"') // 2
    outside = plain if num_texts > MAX_TEXTS else b"".join(plain.split(b'"')[::2])
    return _try_find_too_many(outside, num_texts)


def try_find_size_problem_of(text: str) -> str | None:
    """The same of one that is no bytes yet; of a short one none are made."""
    return None if len(text) <= _SHORT_BYTES else try_find_size_problem(text.encode("utf-8", "surrogatepass"))


def _try_find_too_many(outside: bytes, num_texts: int) -> str | None:
    found = (
        (num_texts, MAX_TEXTS, "texts"),
        (outside.count(b"{") + outside.count(b"["), MAX_CONTAINERS, "objects and lists"),
        (outside.count(b","), MAX_VALUES, "values"),
    )
    for number, limit, of_what in found:
        if number > limit:
            return f"has more than {limit} {of_what}; send less at once"
    if len(outside) > MAX_LONG_NUMBERS * len(_LONG_DIGITS):
        num_long = outside.translate(_TO_ZEROS).count(_LONG_DIGITS)
        if num_long > MAX_LONG_NUMBERS:
            return f"has more than {MAX_LONG_NUMBERS} numbers of 20 digits; send less at once"
    return None

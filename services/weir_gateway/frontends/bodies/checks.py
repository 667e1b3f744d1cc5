"""What bodies of all APIs are checked with: how long a list may be, and how a message shows what a client sent."""

from collections.abc import Sequence

from weir.core.errors import FieldViolation

MAX_ENTRIES = 4096
"""Of a list that is read entry by entry. What each means has lower bounds, under which a longer one cannot be; this one
is known before the event loop has read them."""
MAX_SHOWN_CHARS = 80


def is_too_long(entries: Sequence[object], field: str, violations: list[FieldViolation]) -> bool:
    """Then it is in `violations`."""
    if len(entries) > MAX_ENTRIES:
        violations.append(FieldViolation(field, too_long(len(entries))))
    return len(entries) > MAX_ENTRIES


def too_long(num_entries: int | None) -> str:
    """The same. None: more than may be, and nobody has counted them."""
    number = f"over {MAX_ENTRIES}" if num_entries is None else f"{num_entries}"
    return f"has {number} entries; at most {MAX_ENTRIES} are read"


def shown(value: object) -> str:
    """In a message, which is short."""
    plain = value if isinstance(value, str) else repr(value)
    return plain if len(plain) <= MAX_SHOWN_CHARS else plain[: MAX_SHOWN_CHARS - 1] + "…"

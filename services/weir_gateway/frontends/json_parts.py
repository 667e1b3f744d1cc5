"""JSON of much that is one answer. The library's encoder is quick, and holds the interpreter until it is done: in
parts, and in a thread, it lets others run between them."""

import json
from collections.abc import Sequence

MAX_INLINE_ENTRIES = 1024
"""Log-probabilities and token ids of an answer that is rendered in the event loop: more of them in a thread."""

_NUM_AT_ONCE = 512
_MAX_DEPTH = 7
"""Of objects that are taken apart. The deepest: an event, its response, the output, one item, its content, one part,
the list of log-probabilities."""


def dump(value: object) -> str:
    """As clients get all JSON: compact, and in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def dump_in_parts(value: object, depth: int = 0) -> str:
    """The same text. Objects are taken apart down to a depth, and long lists cut."""
    if depth < _MAX_DEPTH and isinstance(value, dict):
        return (
            "{" + ",".join(f"{dump(str(key))}:{dump_in_parts(entry, depth + 1)}" for key, entry in value.items()) + "}"
        )
    if isinstance(value, list) and len(value) > _NUM_AT_ONCE:
        return dump_array(value)
    if depth < _MAX_DEPTH and isinstance(value, list) and any(isinstance(entry, dict | list) for entry in value):
        return "[" + ",".join(dump_in_parts(entry, depth + 1) for entry in value) + "]"
    return dump(value)


def dump_array(values: Sequence[object]) -> str:
    """Cut into parts."""
    parts = (dump(values[first : first + _NUM_AT_ONCE])[1:-1] for first in range(0, len(values), _NUM_AT_ONCE))
    return f"[{','.join(parts)}]"

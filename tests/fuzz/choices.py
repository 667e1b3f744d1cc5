"""Structured inputs from bytes: what a fuzzer mutates are the choices, and what comes of them is nearly right."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

NUMBERS: tuple[int | float, ...] = (
    *(0, 1, -1, 2, 3, 7, 16, 127, 128, 255, 256, 1 << 15, (1 << 16) - 1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1),
    *(1 << 40, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1, 1 << 64, 10**400),
    *(0.5, -0.0, 1e-320, 1e308, float("inf"), float("-inf"), float("nan")),
)
TEXTS = (
    "",
    "x",
    "\0",
    "\ud800",
    "é\u2028",
    "../../x",
    "<|im_end|>",
    "a" * 300,
    "{{ x }}",
    "0",
    "auto",
    "none",
    "\U0001f600",
)
_MAX_DEPTH_OF_NEST = 3000
_MAX_REPEATED_CHARS = 5000


class Choices:
    """Taken from the front of `data`; behind its end all are the first."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def is_over(self) -> bool:
        return self._at >= len(self._data)

    def byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def below(self, bound: int) -> int:
        """In [0, bound)."""
        num_bytes = max(1, ((bound - 1).bit_length() + 7) // 8)
        return int.from_bytes([self.byte() for _ in range(num_bytes)], "little") % max(bound, 1)

    def pick(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def some_bytes(self, max_bytes: int) -> bytes:
        taken = self._data[self._at : self._at + self.below(max_bytes + 1) + 1]
        self._at += len(taken)
        return taken

    def text(self, max_bytes: int = 24) -> str:
        return self.pick(TEXTS) if self.byte() % 2 else self.some_bytes(max_bytes).decode("utf-8", "replace")

    def rest(self) -> bytes:
        taken = self._data[self._at :]
        self._at = len(self._data)
        return taken

    def value(self, depth: int = 2) -> Any:
        """Of any kind that JSON has."""
        found: Any
        match self.below(12 if depth else 8):
            case 0 | 1 | 2:
                found = self.pick(NUMBERS)
            case 3:
                found = self.below(1 << 16)
            case 4 | 5:
                found = self.text()
            case 6 | 7:
                found = self.pick((None, True, False, (), {}))
            case 8 | 9:
                found = [self.value(depth - 1) for _ in range(self.below(4))]
            case _:
                found = {self.text(8): self.value(depth - 1) for _ in range(self.below(4))}
        return found


def edited(choices: Choices, valid: bytes, max_edits: int = 8, *, in_place: bool = False) -> bytes:
    """`valid` with bits flipped, numbers written over, parts cut out, put in or repeated; or cut off. `in_place`: only
    the first two."""
    data = bytearray(valid)
    for _ in range(choices.below(max_edits) + 1):
        at = choices.below(len(data) + 1)
        match choices.below(4 if in_place else 8):
            case 0 if at < len(data):
                data[at] ^= 1 << choices.below(8)
            case 1:
                data[at : at + 1] = bytes([choices.byte()])
            case 2 | 3:
                number = choices.pick([one for one in NUMBERS if isinstance(one, int) and 0 <= one < 1 << 64])
                width = choices.pick((2, 4, 8))
                data[at : at + width] = (number & ((1 << 8 * width) - 1)).to_bytes(width, "little")
            case 4:
                del data[at : at + choices.below(64) + 1]
            case 5:
                data[at:at] = choices.some_bytes(16)
            case 6:
                data[at:at] = data[at : at + choices.below(64) + 1]
            case _:
                del data[at:]
        if choices.is_over:
            break
    return bytes(data)


def mutated_json(choices: Choices, valid: Mapping[str, Any], max_edits: int = 4) -> bytes:
    """`valid` with fields exchanged, renamed, left out or nested deeply, as JSON (with NaN, as Python has it)."""
    document = json.loads(json.dumps(valid))
    nest = 0
    for _ in range(choices.below(max_edits) + 1):
        holder, key = document, ""
        while isinstance(holder, dict | list) and holder:
            keys = list(holder) if isinstance(holder, dict) else range(len(holder))
            parent, key = holder, choices.pick(keys)
            holder = parent[key]
            if isinstance(holder, dict | list) and choices.below(3):
                continue
            match choices.below(8):
                case 0:
                    del parent[key]
                case 1 if isinstance(parent, dict):
                    parent[choices.text(8)] = parent.pop(key)
                case 2:
                    parent[key] = "DEEP"
                    nest = choices.below(_MAX_DEPTH_OF_NEST)
                case 3:
                    times = 40 if len(json.dumps(parent[key])) < _MAX_REPEATED_CHARS else 2
                    parent[key] = [parent[key]] * choices.below(times)
                case _:
                    parent[key] = choices.value()
            break
        if choices.is_over:
            break
    raw = json.dumps(document)
    return raw.replace('"DEEP"', "[" * nest + "]" * nest).encode()

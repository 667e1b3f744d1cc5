"""Reading trace files, plain or gzipped: records that check their own fields, and errors that say where."""

import csv
import gzip
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

_MAX_TOKENS = 100_000_000
_SHOWN = 80


class TraceError(ValueError):
    """A trace cannot be read: `path`, the `line` counted from 1 (0: the file as a whole), the `field` if it is one."""

    def __init__(self, path: Path, line: int, field: str, problem: str) -> None:
        where = f"{path}" + (f", line {line}" if line else "") + (f", field {field!r}" if field else "")
        super().__init__(f"{where}: {problem}")
        self.path = path
        self.line = line
        self.field = field


@dataclass(frozen=True, slots=True)
class Record:
    """One line. The methods take a field's name and raise TraceError if it is missing or wrong."""

    path: Path
    line: int
    fields: Mapping[str, object]

    def __contains__(self, field: str) -> bool:
        return field in self.fields

    def error(self, field: str, problem: str) -> TraceError:
        return TraceError(self.path, self.line, field, problem)

    def value(self, field: str) -> object:
        if field not in self.fields or self.fields[field] is None:
            raise self.error(field, f"is missing; there are {', '.join(self.fields) or 'none'}")
        return self.fields[field]

    def count(self, field: str, at_least: int = 1) -> int:
        """A whole number of tokens."""
        number = self.number(field)
        if number != int(number) or not at_least <= number <= _MAX_TOKENS:
            raise self.error(field, f"{number:g} must be a whole number from {at_least} to {_MAX_TOKENS}")
        return int(number)

    def number(self, field: str, at_least: float = -math.inf) -> float:
        """Finite, and at least so much."""
        value = self.value(field)
        try:
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise ValueError
            number = float(value)
        except (ValueError, OverflowError):
            raise self.error(field, f"{_shown(value)} is not a number") from None
        if not math.isfinite(number) or number < at_least:
            raise self.error(field, f"{number:g} must be finite" + (f" and at least {at_least:g}" * (at_least > -1e9)))
        return number

    def text(self, field: str) -> str:
        value = self.value(field)
        if not isinstance(value, str):
            raise self.error(field, f"{_shown(value)} is not text")
        return value

    def ids(self, field: str) -> tuple[int, ...]:
        """A list of whole numbers."""
        value = self.value(field)
        if not isinstance(value, list) or not all(type(entry) is int for entry in value):
            raise self.error(field, f"{_shown(value)} is not a list of whole numbers")
        return tuple(value)

    def children(self, field: str) -> list["Record"]:
        """A list of objects, as records of the same line."""
        value = self.value(field)
        if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
            raise self.error(field, f"{_shown(value)} is not a list of objects")
        return [Record(self.path, self.line, entry) for entry in value]


def open_text(path: Path) -> IO[str]:
    """By its name: `.gz` is gzipped. Raises OSError."""
    if path.name.endswith(".gz"):
        return cast(IO[str], gzip.open(path, "rt", encoding="utf-8", newline=""))
    return path.open(encoding="utf-8", newline="")


def is_csv(path: Path) -> bool:
    return path.name.removesuffix(".gz").endswith(".csv")


def csv_header(path: Path) -> list[str]:
    """Raises TraceError."""
    with _Readable(path), open_text(path) as file:
        return next(csv.reader(file), [])


def csv_records(path: Path) -> Iterator[Record]:
    """Rows under a header. Raises TraceError."""
    with _Readable(path), open_text(path) as file:
        reader = csv.DictReader(file)
        for row in reader:
            if None in row:
                raise TraceError(path, reader.line_num, "", f"has more than the {len(reader.fieldnames or ())} columns")
            yield Record(path, reader.line_num, row)


def json_records(path: Path) -> Iterator[Record]:
    """One JSON object a line; empty lines are passed over. Raises TraceError."""
    with _Readable(path), open_text(path) as file:
        for line, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                fields = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise TraceError(path, line, "", f"is not JSON: {error}") from error
            if not isinstance(fields, dict):
                raise TraceError(path, line, "", f"{_shown(fields)} is not a JSON object")
            yield Record(path, line, fields)


class _Readable:
    """What goes wrong between disk and text becomes a TraceError of the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, UnicodeDecodeError | EOFError | OSError | csv.Error):
            raise TraceError(self._path, 0, "", f"cannot be read: {error}") from error


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"

"""Fields of settings: parsed from the text of a flag, of an environment variable or from TOML, and held to what
they may be."""

import re
import types
from collections.abc import Collection, Mapping
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

ByteSize = Annotated[int, "bytes"]
"""A field that counts bytes: a plain number, or one with a unit such as 16GiB."""

_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})
_UNITS: Mapping[str, int] = {
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")
_SCALAR_NAMES: dict[Any, str] = {
    ByteSize: f"a number of bytes, or one with a unit: 16GiB, 1.5GB ({', '.join(_UNITS)})",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
}


def describe_type(kind: Any) -> str:
    """What a value of this type looks like, for help texts and errors."""
    if kind in _SCALAR_NAMES:
        return _SCALAR_NAMES[kind]
    choices = choices_of(kind)
    if choices:
        return "one of " + ", ".join(choices)
    if get_origin(kind) is tuple:
        return f"a list, each {describe_type(_item_type(kind))}"
    return f"{describe_type(_optional_inner(kind))}, or empty"


def choices_of(kind: Any) -> tuple[str, ...]:
    """The allowed words of an enum or a Literal; empty for other types."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return tuple(str(member.value) for member in kind)
    if get_origin(kind) is Literal:
        return tuple(str(choice) for choice in get_args(kind))
    return ()


def parse_text(kind: Any, text: str) -> Any:
    """The value that `text` stands for; a tuple's items are separated by commas. Raises ValueError."""
    if kind is bool:
        return _parse_bool(text)
    if kind == ByteSize:
        return parse_size(text)
    if kind in (int, float, str, Path):
        return kind(text.strip()) if kind in (int, float) else kind(text)
    if choices_of(kind):
        return _parse_choice(kind, text)
    if get_origin(kind) is tuple:
        items = [item.strip() for item in text.split(",")] if text.strip() else []
        return tuple(parse_text(_item_type(kind), item) for item in items)
    inner = _optional_inner(kind)
    return None if text == "" else parse_text(inner, text)


def parse_toml(kind: Any, value: Any) -> Any:
    """A TOML value as the field's type: no text where a number is meant, no 1 for true. Raises ValueError."""
    if kind == ByteSize and isinstance(value, str):
        return parse_size(value)
    kind = int if kind == ByteSize else kind
    if kind in (bool, int, str):
        if type(value) is not kind:
            raise ValueError
        return value
    if kind is float:
        if type(value) not in (int, float):
            raise ValueError
        return float(value)
    if kind is Path or choices_of(kind):
        if not isinstance(value, str):
            raise ValueError
        return parse_text(kind, value)
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError
        return tuple(parse_toml(_item_type(kind), item) for item in value)
    return None if value == "" else parse_toml(_optional_inner(kind), value)


def parse_size(text: str) -> int:
    """Bytes of `16GiB`, `1.5 GB` or `1024`; parts of a byte are cut off. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return int(text)
    number, unit = match.groups()
    num_bytes = {name.lower(): factor for name, factor in _UNITS.items()}.get(unit.lower())
    if num_bytes is None:
        raise ValueError(text)
    return int(Fraction(number) * num_bytes)


def format_size(num_bytes: int) -> str:
    """As people read it, in the largest unit of 1024 that it has one of; one decimal: `1.5 GiB`."""
    for unit in ("GiB", "MiB", "KiB"):
        if num_bytes >= _UNITS[unit]:
            return f"{num_bytes / _UNITS[unit]:.1f}".removesuffix(".0") + f" {unit}"
    return f"{num_bytes} bytes"


def check_range(settings: object, name: str, low: float, high: float, *, of: str = "") -> None:
    """Raises ValueError that names the field, its value and the range, behind `of`: whose settings they are."""
    value = getattr(settings, name)
    if not low <= value <= high:  # not a number is in no range
        raise ValueError(f"{_prefix(of)}{name} {value}: must be in [{low}, {high}]")


def check_choice(settings: object, name: str, known: Collection[str], *, of: str = "") -> None:
    """Raises ValueError that names the field, its value and what it may be."""
    value = getattr(settings, name)
    if value not in known:
        raise ValueError(f"{_prefix(of)}{name} {value!r}: is none of {', '.join(known)}")


def _parse_bool(text: str) -> bool:
    word = text.strip().lower()
    if word not in _TRUE | _FALSE:
        raise ValueError(text)
    return word in _TRUE


def _parse_choice(kind: Any, text: str) -> Any:
    members: tuple[Any, ...] = get_args(kind) or tuple(kind)
    for member in members:
        if text == str(member.value if isinstance(member, Enum) else member):
            return member
    raise ValueError(text)


def _item_type(kind: Any) -> Any:
    arguments = get_args(kind)
    if len(arguments) != 2 or arguments[1] is not Ellipsis:
        raise TypeError(f"{kind}: of tuples only tuple[X, ...] can be a config field")
    return arguments[0]


def _optional_inner(kind: Any) -> Any:
    if get_origin(kind) not in (Union, types.UnionType):
        raise TypeError(f"{kind} cannot be a config field")
    inner = [argument for argument in get_args(kind) if argument is not type(None)]
    if len(inner) != 1:
        raise TypeError(f"{kind}: of unions only X | None can be a config field")
    return inner[0]


def _prefix(of: str) -> str:
    return f"{of}: " if of else ""

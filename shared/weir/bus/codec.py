"""The messages of `bus.messages` and `bus.configuration` to MessagePack and back: maps by field name, checked strictly.

A missing, mistyped or unbounded field is a MalformedMessage that names it; an unknown field is ignored, so that an
older process understands a newer one.
"""

import math
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

VERSION_HEADER = "Weir-Version"
WIRE_VERSION = "2"

MAX_MESSAGE_BYTES = 1_000_000
"""Under the default max_payload of nats-server (1 MiB), with room for headers."""
MAX_STRING_CHARS = 1024
MAX_INT = 2**63 - 1

_Decoder = Callable[[object, str], Any]
MessageT = TypeVar("MessageT", bound="DataclassInstance")


class MalformedMessage(Exception):
    """The bytes are not the message that was expected. `field` is the path of the first wrong field."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field or 'message'}: {problem}")
        self.field = field
        self.problem = problem


class MessageTooLarge(ValueError):
    """The message is over a limit, so nobody would accept it: a defect of the sender."""


def encode(message: "DataclassInstance") -> bytes:
    """Raises MessageTooLarge over MAX_MESSAGE_BYTES."""
    payload: bytes = msgpack.packb(_to_plain(message), use_bin_type=True)
    if len(payload) > MAX_MESSAGE_BYTES:
        raise MessageTooLarge(
            f"{type(message).__name__} of {len(payload)} bytes: at most {MAX_MESSAGE_BYTES}; send it in parts"
        )
    return payload


def decode(message_type: type[MessageT], payload: bytes) -> MessageT:
    """Raises MalformedMessage, whatever the bytes are."""
    if len(payload) > MAX_MESSAGE_BYTES:
        raise MalformedMessage("", f"{len(payload)} bytes, at most {MAX_MESSAGE_BYTES}")
    try:
        plain = msgpack.unpackb(payload, raw=False, strict_map_key=True)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise MalformedMessage("", f"not MessagePack ({type(error).__name__}: {error})") from error
    message: MessageT = _decoder_of(message_type)(plain, "")
    return message


def version_headers() -> dict[str, str]:
    """Headers that every message carries."""
    return {VERSION_HEADER: WIRE_VERSION}


def check_version(headers: Mapping[str, str]) -> None:
    """Raises MalformedMessage when the sender says that it speaks another version; silence means this one."""
    version = headers.get(VERSION_HEADER, WIRE_VERSION)
    if version != WIRE_VERSION:
        raise MalformedMessage(f"header {VERSION_HEADER}", f"{version[:32]!r}, this process speaks {WIRE_VERSION!r}")


def _to_plain(value: object) -> object:
    kind: Any = type(value)
    if kind in _SCALARS:
        return value
    names = _field_names(kind)
    if names is not None:
        return {name: _to_plain(getattr(value, name)) for name in names}
    if isinstance(value, tuple):
        return [_to_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return value


@cache
def _field_names(kind: type) -> tuple[str, ...] | None:
    """Of a message; None for all else."""
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else None


@cache
def _decoder_of(annotation: Any) -> _Decoder:
    """Builds the check of one annotation once; messages are then decoded by calls alone."""
    if annotation in _SCALARS:
        return _SCALARS[annotation]
    if get_origin(annotation) is tuple:
        return _tuple_decoder(annotation)
    if get_origin(annotation) in (Union, types.UnionType):
        return _optional_decoder(annotation)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return _enum_decoder(annotation)
    if is_dataclass(annotation) and isinstance(annotation, type):
        return _dataclass_decoder(annotation)
    raise TypeError(f"the codec has no form for a field of type {annotation}")


def _decode_str(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise MalformedMessage(path, f"expected a string, found {_kind(value)}")
    if len(value) > MAX_STRING_CHARS:
        raise MalformedMessage(path, f"{len(value)} characters, at most {MAX_STRING_CHARS}")
    return value


def _decode_int(value: object, path: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise MalformedMessage(path, f"expected an integer, found {_kind(value)}")
    if not 0 <= value <= MAX_INT:
        raise MalformedMessage(path, f"{value} is outside [0, {MAX_INT}]")
    return value


def _decode_bool(value: object, path: str) -> bool:
    if not isinstance(value, bool):
        raise MalformedMessage(path, f"expected a boolean, found {_kind(value)}")
    return value


def _decode_float(value: object, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise MalformedMessage(path, f"expected a number, found {_kind(value)}")
    number = float(value) if abs(value) <= sys.float_info.max else math.inf
    if not math.isfinite(number):
        raise MalformedMessage(path, f"{value}: is not a finite number")
    return number


def _decode_bytes(value: object, path: str) -> bytes:
    if not isinstance(value, bytes):
        raise MalformedMessage(path, f"expected bytes, found {_kind(value)}")
    return value


_SCALARS: Mapping[Any, _Decoder] = {
    str: _decode_str,
    int: _decode_int,
    bool: _decode_bool,
    float: _decode_float,
    bytes: _decode_bytes,
}


def _tuple_decoder(annotation: Any) -> _Decoder:
    item_type, *rest = get_args(annotation)
    if rest != [Ellipsis]:
        raise TypeError(f"the codec takes tuples of one type and any length, not {annotation}")
    decode_item = _decoder_of(item_type)

    def decode_tuple(value: object, path: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise MalformedMessage(path, f"expected a list, found {_kind(value)}")
        return tuple(decode_item(item, f"{path}[{index}]") for index, item in enumerate(value))

    return decode_tuple


def _optional_decoder(annotation: Any) -> _Decoder:
    inner = [argument for argument in get_args(annotation) if argument is not types.NoneType]
    if len(inner) != 1:
        raise TypeError(f"the codec takes X | None, not {annotation}")
    decode_present = _decoder_of(inner[0])
    return lambda value, path: None if value is None else decode_present(value, path)


def _enum_decoder(enum_type: type[Enum]) -> _Decoder:
    by_value = {member.value: member for member in enum_type}

    def decode_enum(value: object, path: str) -> Enum:
        member = by_value.get(value) if isinstance(value, str) else None
        if member is None:
            raise MalformedMessage(path, f"{_shown(value)} is none of {', '.join(by_value)}")
        return member

    return decode_enum


def _dataclass_decoder(message_type: type["DataclassInstance"]) -> _Decoder:
    hints = get_type_hints(message_type)
    members = [(field.name, _decoder_of(hints[field.name]), _is_optional(field)) for field in fields(message_type)]

    def decode_dataclass(value: object, path: str) -> "DataclassInstance":
        if not isinstance(value, dict):
            raise MalformedMessage(path, f"expected a map, found {_kind(value)}")
        prefix = f"{path}." if path else ""
        found: dict[str, Any] = {}
        for name, decode_field, is_optional in members:
            if name in value:
                found[name] = decode_field(value[name], prefix + name)
            elif not is_optional:
                raise MalformedMessage(prefix + name, "is missing")
        try:
            return message_type(**found)
        except ValueError as error:  # the message's own check, which begins with the name of the field
            name, _, problem = str(error).partition(" ")
            is_named = name in found
            raise MalformedMessage(prefix + name if is_named else path, problem if is_named else str(error)) from error

    return decode_dataclass


def _is_optional(field: Field[Any]) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING


def _kind(value: object) -> str:
    return "nothing" if value is None else type(value).__name__


def _shown(value: object) -> str:
    return repr(value[:64]) if isinstance(value, str) else _kind(value)

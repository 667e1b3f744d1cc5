"""Parameters of policies: frozen dataclasses of bounded numbers and switches, made from text or from plain numbers.

hybrid:alpha_s_per_token=0.002,default_ttft_s=1       a name, then what differs from the defaults
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeVar

ParamsT = TypeVar("ParamsT")


@dataclasses.dataclass(frozen=True, slots=True)
class NoParams:
    """Of a policy with nothing to set."""


_SWITCH_WORDS = {"on": 1.0, "true": 1.0, "1": 1.0, "off": 0.0, "false": 0.0, "0": 0.0}


def bounded(default: float, low: float, high: float = math.inf) -> Any:
    """A field that must be in [low, high]."""
    return dataclasses.field(default=default, metadata={"low": low, "high": high})


def check_bounds(params: Any) -> None:
    """Raises ValueError that names field, value and limits."""
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        low, high = field.metadata.get("low", 0.0), field.metadata.get("high", 1.0)
        if not (low <= value <= high and math.isfinite(value)):
            raise ValueError(f"{field.name} {value}: must be {_describe(field)}")


def describe(kind: type) -> str:
    """What may be set, for help texts and errors."""
    fields = dataclasses.fields(kind)
    if not fields:
        return "it has no parameters"
    return "; ".join(f"{field.name}: {_describe(field)}, default {_show(field)}" for field in fields)


def make_params(kind: type[ParamsT], values: Mapping[str, float]) -> ParamsT:
    """The dataclass with these values in place of its defaults; whole numbers where it wants them, 0 or 1 for switches.

    Raises ValueError that names the key or the value and what is allowed.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        if name not in fields:
            raise ValueError(f"no parameter {name!r} ({describe(kind)})")
        wanted = fields[name].type
        if wanted is bool and value in (0, 1):
            arguments[name] = bool(value)
        elif wanted is int and float(value).is_integer():
            arguments[name] = int(value)
        elif wanted is float:
            arguments[name] = float(value)
        else:
            raise ValueError(f"{name} {value}: must be {_describe(fields[name])}")
    return kind(**arguments)


def parse_values(text: str) -> dict[str, float]:
    """`key=value,key=value`; on and off are 1 and 0. Raises ValueError."""
    values: dict[str, float] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not name:
            raise ValueError(f"{item!r}: must be KEY=VALUE")
        if name in values:
            raise ValueError(f"{name} is set twice")
        try:
            values[name] = _SWITCH_WORDS[value.lower()] if value.lower() in _SWITCH_WORDS else float(value)
        except ValueError:
            raise ValueError(f"{name} {value!r}: must be a number, on or off") from None
    return values


def _describe(field: "dataclasses.Field[Any]") -> str:
    if field.type is bool:
        return "on or off"
    low, high = field.metadata["low"], field.metadata["high"]
    kind = "a whole number" if field.type is int else "a number"
    return f"{kind} of at least {low:g}" if high == math.inf else f"{kind} in [{low:g}, {high:g}]"


def _show(field: "dataclasses.Field[Any]") -> str:
    if field.type is bool:
        return "on" if field.default else "off"
    return f"{field.default:g}"

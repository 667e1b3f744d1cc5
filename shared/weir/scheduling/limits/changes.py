"""Limits changed one by one at run time: `lanes.batch.max_queued` = `100`, by the names of the limits file."""

import tomllib
from collections.abc import Sequence
from typing import Any

from weir.core.errors import FieldViolation, InvalidRequest
from weir.scheduling.limits.core_limits import CoreLimits
from weir.scheduling.limits.file import format_limits, limits_from_document


def change_limits(limits: CoreLimits, changes: Sequence[tuple[str, str]]) -> CoreLimits:
    """`limits` with every change, or none of them: (key, value in TOML; a word needs no quotes).

    A tenant that is not there yet is made; lanes are not, since their order says how urgent they are. Raises
    InvalidRequest that names the key that cannot be.
    """
    document = tomllib.loads(format_limits(limits))
    for key, text in changes:
        match key.split("."):
            case ["lanes", name, _] if name not in limits.lanes_by_name:
                known = ", ".join(limits.lanes_by_name)
                raise _bad(key, f"lane {name!r} is none of {known}; a new lane needs its place in the limits file")
            case ["lanes" | "tenants" as table, name, field]:
                document.setdefault(table, {}).setdefault(name, {})[field] = _read_value(text)
            case ["default_tenant", field]:
                document["default_tenant"][field] = _read_value(text)
            case [name] if name not in ("lanes", "tenants", "default_tenant"):
                document[name] = _read_value(text)
            case _:
                raise _bad(key, "is no limit; give lanes.NAME.FIELD, tenants.NAME.FIELD or default_tenant.FIELD")
    return limits_from_document(document, limits)


def _read_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _bad(key: str, description: str) -> InvalidRequest:
    return InvalidRequest([FieldViolation(key[:100], description)])

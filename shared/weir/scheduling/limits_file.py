"""The limits file, and changes at run time by its names (`lanes.batch.max_queued` = `100`).

TOML, read strictly, so that a slip of the pen is an error and not a default.

default_lane = "standard"        # also: lane_order, tenant_order, lent_share, max_queued, slot_overcommit,
                                 # rebalances, admin_key_digests

[lanes.interactive]              # in their order in the file, from the most to the least urgent
max_queued = 4000
max_wait_s = 60
guaranteed_share = 0.3

[tenants.search]
weight = 2
tokens_per_min = 600_000

[default_tenant]                 # everybody else
requests_per_min = 60

[workers.decode]                 # all of a role; or one of them, as [workers.decode-0]
max_num_seqs = 16
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, replace
from typing import Any, get_type_hints

from weir.core.errors import FieldViolation, InvalidRequest
from weir.core.fields import describe_type, parse_toml
from weir.scheduling.limits import DEFAULT_TENANT, CoreLimits, LaneLimits, TenantLimits
from weir.scheduling.worker_limits import WorkerLimits

_SCALARS = (
    "default_lane",
    "lane_order",
    "tenant_order",
    "lent_share",
    "max_queued",
    "slot_overcommit",
    "rebalances",
    "admin_key_digests",
)
_TABLES = ("lanes", "tenants", "default_tenant", "workers")
MAX_FILE_BYTES = 4 * 1024 * 1024
_MAX_KEY_CHARS = 100


def parse_limits(text: str, base: CoreLimits) -> CoreLimits:
    """`base` with what the file says; what it leaves out stays. Raises InvalidRequest, naming key, value and limit."""
    if len(text.encode()) > MAX_FILE_BYTES:
        raise _bad("file", f"over {MAX_FILE_BYTES} bytes")
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers too long and lists too deep to be read
        raise _bad("file", f"not TOML: {error}") from error
    return limits_from_document(document, base)


def limits_from_document(document: Mapping[str, Any], base: CoreLimits) -> CoreLimits:
    """As `parse_limits`, from TOML that is parsed already."""
    changes = _changes(document)
    try:
        return replace(base, **changes)
    except ValueError as error:  # begins with the name of the field, where it is about one alone
        name, _, problem = str(error).partition(" ")
        is_named = name.rstrip(":") in _SCALARS
        raise _bad(name.rstrip(":") if is_named else "file", problem if is_named else str(error)) from error


def format_limits(limits: CoreLimits) -> str:
    """The file that says these limits; defaults are left out of lanes and tenants."""
    lines = [f"{name} = {json.dumps(getattr(limits, name))}" for name in _SCALARS]
    for lane in limits.lanes:
        lines += ["", f"[lanes.{lane.name}]", *_format(lane)]
    for tenant in limits.tenants:
        lines += ["", f"[tenants.{tenant.name}]", *_format(tenant)]
    lines += ["", "[default_tenant]", *_format(limits.default_tenant)]
    for worker in limits.workers:
        lines += ["", f"[workers.{worker.name}]", *_format(worker)]
    return "\n".join(lines) + "\n"


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
                raise _bad(
                    key[:_MAX_KEY_CHARS],
                    f"lane {name!r} is none of {known}; a new lane needs its place in the limits file",
                )
            case ["lanes" | "tenants" | "workers" as table, name, field]:
                document.setdefault(table, {}).setdefault(name, {})[field] = _read_value(text)
            case ["default_tenant", field]:
                document["default_tenant"][field] = _read_value(text)
            case [name] if name not in _TABLES:
                document[name] = _read_value(text)
            case _:
                raise _bad(
                    key[:_MAX_KEY_CHARS],
                    "is no limit; give lanes.NAME.FIELD, or the same of tenants, workers or default_tenant",
                )
    return limits_from_document(document, limits)


def try_value_of(limits: CoreLimits, key: str) -> str | None:
    """In TOML, what a key of `change_limits` says in these limits; None: nothing, as of a tenant that is not there."""
    owners: Mapping[str, LaneLimits | TenantLimits | WorkerLimits]
    match key.split("."):
        case ["lanes", name, field]:
            owners = limits.lanes_by_name
        case ["tenants", name, field]:
            owners = {tenant.name: tenant for tenant in limits.tenants}
        case ["workers", name, field]:
            owners = {worker.name: worker for worker in limits.workers}
        case ["default_tenant", field]:
            name, owners = limits.default_tenant.name, {limits.default_tenant.name: limits.default_tenant}
        case _:
            return json.dumps(getattr(limits, key)) if key in _SCALARS else None
    return json.dumps(getattr(owners[name], field)) if name in owners and hasattr(owners[name], field) else None


def _read_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _changes(document: Mapping[str, Any]) -> dict[str, Any]:
    for key in document:
        if key not in (*_SCALARS, *_TABLES):
            raise _bad(key, f"unknown; known are {', '.join((*_SCALARS, *_TABLES))}")
    hints = get_type_hints(CoreLimits)
    changes = {name: _value(name, hints[name], document[name]) for name in _SCALARS if name in document}
    for name, kind in (("lanes", LaneLimits), ("tenants", TenantLimits), ("workers", WorkerLimits)):
        if name in document:
            tables = document[name]
            if not isinstance(tables, dict):
                raise _bad(name, f"must be tables, each begun with [{name}.NAME]")
            changes[name] = tuple(_read(f"{name}.{key}", kind, key, table) for key, table in tables.items())
    if "default_tenant" in document:
        name = DEFAULT_TENANT.name
        changes["default_tenant"] = _read("default_tenant", TenantLimits, name, document["default_tenant"])
    return changes


def _read(path: str, kind: type[Any], name: str, table: Any) -> Any:
    """One table as `kind`."""
    if not isinstance(table, dict):
        raise _bad(path, "must be a table")
    known = {each.name: each for each in fields(kind) if each.name != "name"}
    hints = get_type_hints(kind)
    for key in table:
        if key not in known:
            raise _bad(f"{path}.{key}", f"unknown; known are {', '.join(known)}")
    for key, each in known.items():
        if key not in table and not _has_default(each):
            raise _bad(f"{path}.{key}", f"missing, must be {describe_type(hints[key])}")
    values = {key: _value(f"{path}.{key}", hints[key], value) for key, value in table.items()}
    try:
        return kind(name=name, **values)
    except ValueError as error:
        raise _bad(path, str(error)) from error


def _value(path: str, kind: Any, value: Any) -> Any:
    try:
        return parse_toml(kind, value)
    except (ValueError, OverflowError):
        # What stands in place of digests may be a key by mistake, so it is not repeated.
        shown = "what is there" if path.endswith("_key_digests") else repr(value)
        raise _bad(path, f"{shown}, must be {describe_type(kind)}") from None


def _bad(path: str, description: str) -> InvalidRequest:
    return InvalidRequest([FieldViolation(path, description)])


def _has_default(each: "Field[Any]") -> bool:
    return each.default is not MISSING or each.default_factory is not MISSING


def _format(limits: LaneLimits | TenantLimits | WorkerLimits) -> list[str]:
    values = ((each.name, each.default, getattr(limits, each.name)) for each in fields(limits) if each.name != "name")
    return [f"{name} = {json.dumps(value)}" for name, default, value in values if value != default]

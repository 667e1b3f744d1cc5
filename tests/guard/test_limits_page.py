"""The pages that give numbers give those of the code: bounds, ranges of options, statuses of errors."""

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import pytest
from tests.guard import documents
from tests.guard.sources import ROOT

from weir.core import errors
from weir.core.options import NUMBER_RULES
from weir.rpc.errors import status_code
from weir.runtime.config import ServiceConfig
from weir.runtime.stack.config import StackConfig
from weir.scheduling.limits import DEFAULT_LANES, CoreLimits, LaneLimits, TenantLimits
from weir.scheduling.worker_limits import WorkerLimits
from weir.worker.config import WorkerConfig
from weir.worker.roles.config import DecodeConfig, PrefillConfig
from weir_gateway.config import GatewayConfig
from weir_gateway.frontends.openai.render import error_status
from weir_scheduler.config import SchedulerConfig
from weir_transfer.config import TransferConfig

LIMITS, API = ROOT / "shared/docs/limits.md", ROOT / "shared/docs/api.md"
UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
SERVICE = {entry.name for entry in fields(ServiceConfig)}


def numbers_of(kind: type[Any], *, without: set[str] = frozenset()) -> dict[str, float]:  # type: ignore[assignment]
    """Every field of a dataclass whose default is a number: what bounds something does."""
    return {
        entry.name: entry.default
        for entry in fields(kind)
        if isinstance(entry.default, int | float) and not isinstance(entry.default, bool) and entry.name not in without
    }


def parsed(cell: str) -> float:
    """65,536 or 256 MiB."""
    number, unit = re.fullmatch(r"(-?[\d,.]+) ?(\w*)", cell).groups()  # type: ignore[union-attr]
    return float(number.replace(",", "")) * UNITS[unit]


def shown(rows: Sequence[Sequence[str]], column: int = 1) -> dict[str, float]:
    """Name -> number; rows that leave the column empty left out."""
    return {row[0].strip("`"): parsed(row[column]) for row in rows if row[column]}


@pytest.mark.parametrize(
    ("heading", "table", "wanted"),
    [
        ("Every process", 0, numbers_of(ServiceConfig)),
        ("Gateway", 0, numbers_of(GatewayConfig, without=SERVICE)),
        ("Scheduler", 0, numbers_of(SchedulerConfig, without=SERVICE)),
        ("The limits file", 1, numbers_of(CoreLimits)),
        ("The limits file", 2, numbers_of(LaneLimits)),
        ("The limits file", 3, numbers_of(TenantLimits)),
        ("The limits file", 4, numbers_of(WorkerLimits)),
        ("Transfer service", 0, numbers_of(TransferConfig, without=SERVICE)),
        ("`weir up` and its supervisor", 0, numbers_of(StackConfig)),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_every_bound_is_on_the_page_with_its_default(heading: str, table: int, wanted: Mapping[str, float]) -> None:
    assert shown(documents.tables(LIMITS, heading)[table]) == wanted


@pytest.mark.parametrize(("role", "column"), [(PrefillConfig, 1), (DecodeConfig, 2)])
def test_every_bound_of_a_worker_is_on_the_page(role: type[WorkerConfig], column: int) -> None:
    [rows] = documents.tables(LIMITS, "Workers")
    assert shown(rows, column) == numbers_of(role, without=SERVICE)


def test_the_lanes_that_there_are_without_a_file() -> None:
    rows = documents.tables(LIMITS, "The limits file")[0]
    lanes = [(lane.name, float(lane.max_queued), lane.max_wait_s) for lane in DEFAULT_LANES]
    assert [(name, parsed(queued), parsed(wait)) for name, queued, wait in rows] == lanes
    texts = [f"{name}:{queued:.0f}:{wait:.0f}" for name, queued, wait in lanes]
    assert list(SchedulerConfig().lanes) == texts


def test_every_fixed_bound_is_the_number_that_the_code_names() -> None:
    [rows] = documents.tables(LIMITS, "Fixed")
    for what, value, name in rows:
        assert (what, parsed(value)) == (what, float(value_of(name.strip("`"))))


def value_of(dotted: str) -> Any:
    """Of a constant of a module, or of a field's default."""
    parts = dotted.split(".")
    depth = next(depth for depth in range(len(parts) - 1, 0, -1) if is_module(".".join(parts[:depth])))
    found: Any = importlib.import_module(".".join(parts[:depth]))
    for index, name in enumerate(parts[depth:], start=depth):
        is_field = index == len(parts) - 1 and isinstance(found, type)
        found = {entry.name: entry.default for entry in fields(found)}[name] if is_field else getattr(found, name)
    return found


def is_module(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return False
    return True


def test_every_number_of_a_request_is_on_the_page_with_its_range() -> None:
    [rows] = documents.tables(API, "Sampling, and other options")
    shown_ranges = {name.strip("`"): limits for name, limits, _ in rows}
    wanted = {rule.name: described(rule.described(None)) for rule in NUMBER_RULES}
    assert shown_ranges == wanted


def described(text: str) -> str:
    return text.removeprefix("from ")


def test_every_error_is_on_the_page_with_its_statuses() -> None:
    [rows] = documents.tables(API, "Errors")
    found = set()
    for name, grpc_code, http_status, _ in rows:
        error = made(getattr(errors, name.strip("`")))
        assert (grpc_code, int(http_status)) == (status_code(error).name, error_status(error))
        found.add(type(error))
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.WeirError)}
    assert found == kinds - {errors.WeirError}


def made(kind: type[Any]) -> errors.WeirError:
    if kind is errors.InvalidRequest:
        return errors.InvalidRequest([])
    error: errors.WeirError = kind("field", "text") if kind in (errors.NotFound, errors.AlreadyExists) else kind("text")
    return error

"""SECURITY.md says of each path and each method who may call it, as the tables do."""

import re

import pytest
from tests.guard import documents
from tests.guard.sources import ROOT

from weir.rpc.access import RPC_CALLERS, Callers
from weir_gateway.frontends.http_access import HTTP_CALLERS

PAGE = ROOT / "shared/docs/SECURITY.md"


@pytest.fixture(scope="module")
def rows() -> dict[str, tuple[str, str, str]]:
    """By kind of callers."""
    [table] = documents.tables(PAGE, "Who may call what")
    return {who.partition(":")[0]: (http, at_gateway, elsewhere) for who, http, at_gateway, elsewhere in table}


def names(cell: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cell)) | ({"ServerReflection"} if "reflection" in cell else set())


def test_kinds_are_those_of_the_tables(rows: dict[str, tuple[str, str, str]]) -> None:
    assert list(rows) == [callers.value for callers in Callers]


def test_each_path_is_in_the_row_of_who_may_ask_for_it(rows: dict[str, tuple[str, str, str]]) -> None:
    for (_, path), callers in HTTP_CALLERS.items():
        shown = names(rows[callers.value][0])
        begins = {name.removesuffix("…") for name in shown if name.endswith("…")} | {"/console"} & shown
        assert path in shown or any(path.startswith(begin) for begin in begins), path


@pytest.mark.parametrize("column", [0, 1])
def test_each_method_is_in_the_row_of_who_may_call_it(rows: dict[str, tuple[str, str, str]], column: int) -> None:
    """By its own name where the cell names some of a service's methods, else by the service's."""
    for method, entry in RPC_CALLERS.items():
        callers = entry[column]
        if callers is None:
            continue
        service, _, name = method.rpartition(".")[2].partition("/")
        cell = rows[callers.value][1 + column]
        assert (name if f"of `{service}`" in cell else service) in names(cell), method

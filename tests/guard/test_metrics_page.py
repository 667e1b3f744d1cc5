"""The page of metrics names what is exported, and nothing else."""

import pytest
from tests.guard import documents
from tests.guard.sources import ROOT

from weir.telemetry.catalog.entry import FigureEntry
from weir.telemetry.catalog.gateway import GATEWAY
from weir.telemetry.catalog.histograms import HISTOGRAMS
from weir.telemetry.catalog.scheduler import SCHEDULER
from weir.telemetry.catalog.transfer import TRANSFER
from weir.telemetry.catalog.worker import WORKER
from weir.telemetry.described import COMMON
from weir_gateway.metrics.vllm_names import VLLM_NAMES

METRICS = ROOT / "shared/docs/metrics.md"


def shown(heading: str) -> list[tuple[str, str, str]]:
    [rows] = documents.tables(METRICS, heading)
    return [(name.strip("`"), middle.replace("`", ""), text) for name, middle, text in rows]


@pytest.mark.parametrize(
    ("heading", "entries"),
    [
        ("Gateways", GATEWAY),
        ("Schedulers", SCHEDULER),
        ("Transfer services", TRANSFER),
        ("Workers", WORKER),
        ("Every process", COMMON),
    ],
)
def test_every_figure_is_on_the_page(heading: str, entries: tuple[FigureEntry, ...]) -> None:
    assert shown(heading) == [(entry.name, entry.label, entry.help) for entry in entries]


def test_every_histogram_is_on_the_page() -> None:
    assert shown("Histograms") == [(entry.name, ", ".join(entry.labels), entry.help) for entry in HISTOGRAMS]


def test_every_name_of_vllm_is_on_the_page_with_where_its_value_comes_from() -> None:
    assert shown("Names of vLLM") == [(row.name, row.source.value, row.note) for row in VLLM_NAMES]

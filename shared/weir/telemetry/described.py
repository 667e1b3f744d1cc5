"""From what a process says of itself to the families that are exported.

Describe:  queued 3, granted_batch_total 7            weir_scheduler_requests_queued{role, process} 3
           tenant_finished_total{tenant="a"} 2  ──>   weir_lane_grants_total{lane="batch", role, process} 7
           histograms by their exported names         weir_tenant_requests_finished_total{tenant="a", …} 2
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from weir.core.roles import WORKER_ROLES
from weir.telemetry.catalog.entry import FigureEntry, generic_name, rows, scale_of
from weir.telemetry.catalog.gateway import GATEWAY
from weir.telemetry.catalog.histograms import HISTOGRAMS
from weir.telemetry.catalog.scheduler import SCHEDULER
from weir.telemetry.catalog.transfer import TRANSFER
from weir.telemetry.catalog.worker import WORKER
from weir.telemetry.families import Family, Kind, Sample
from weir.telemetry.histogram import HistogramValue

COMMON = rows(
    "process",
    """
rpc_internal_errors_total: Calls over gRPC that ended by a defect.
uncollected_errors_total: Exceptions that no task's owner collected.
certificate_left_s_* > weir_process_certificate_left_seconds by setting: Until a certificate expires; below 0 it has.
certificate_changes_total_* > weir_process_certificate_changes_total by setting: Times that a new one was taken.
certificate_refusals_total_* > weir_process_certificate_refusals_total by setting: New ones that could not be used.
bus_sent_total: Messages sent by NATS.
bus_received_total: Messages received by NATS.
bus_pending: Messages that wait to be handled.
bus_dropped_total: Messages dropped since too many waited.
bus_malformed_total: Messages that could not be read.
bus_handler_failures_total: Messages whose handling failed.
bus_send_failures_total: Messages that could not be sent.
""",
)
"""What processes of every kind may have."""
_OF_ROLE = {"gateway": GATEWAY, "scheduler": SCHEDULER, "transfer": TRANSFER, "prefill": WORKER, "decode": WORKER}
_LABELLED = re.compile(r'([^{]+)\{(\w+)="(.*)"\}', re.DOTALL)
_UNLISTED = "Not described."
_UNKNOWN = "process"
CATALOG = (*COMMON, *GATEWAY, *SCHEDULER, *TRANSFER, *WORKER)


@dataclass(frozen=True, slots=True)
class HistogramFigure:
    """A histogram of a process as it is now, by the name that it is exported by."""

    name: str
    value: HistogramValue
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Described:
    """All figures of one process at one moment."""

    role: str
    process_id: str
    metrics: Mapping[str, float]
    histograms: Sequence[HistogramFigure] = ()


def families_of(described: Described) -> list[Family]:
    """Every series says its role and process. What the table does not have is exported by its own name."""
    own = (("role", described.role), ("process", described.process_id))
    found: dict[str, list[Sample]] = {}
    helps: dict[str, str] = {}
    for source, value in described.metrics.items():
        name, help_text, scale, labels = _resolve(described.role, source)
        helps[name] = help_text
        found.setdefault(name, []).append(Sample(value * scale, (*labels, *own)))
    families = [Family(name, _kind(name), helps[name], tuple(samples)) for name, samples in found.items()]
    return families + histogram_families(described.histograms, own)


def histogram_families(figures: Iterable[HistogramFigure], own: tuple[tuple[str, str], ...] = ()) -> list[Family]:
    """With the labels `own` too."""
    found: dict[str, list[Sample]] = {}
    for figure in figures:
        found.setdefault(figure.name, []).append(Sample(figure.value, (*figure.labels, *own)))
    return [
        Family(name, Kind.HISTOGRAM, _histogram_helps().get(name, _UNLISTED), tuple(samples))
        for name, samples in found.items()
    ]


def try_find(role: str, source: str) -> tuple[FigureEntry, str] | None:
    """The row of a figure, and what its `*` stands for, if it has one. None: there is none."""
    exact, patterns = _tables(role)
    if source in exact:
        return exact[source], ""
    for entry in patterns:
        match = entry.pattern.fullmatch(source)
        if match is not None:
            return entry, match[1]
    return None


_Resolved = tuple[str, str, float, tuple[tuple[str, str], ...]]


def _resolve(role: str, source: str) -> _Resolved:
    """The exported name, its help, the factor to its unit, and the labels that the source has."""
    labelled = _LABELLED.fullmatch(source)
    base, labels = (labelled[1], ((labelled[2], labelled[3]),)) if labelled else (source, ())
    found = try_find(role, base)
    if found is None:
        kind = "worker" if role in WORKER_ROLES else role or _UNKNOWN
        return generic_name(kind, base), _UNLISTED, scale_of(base), labels
    entry, value = found
    return entry.name, entry.help, entry.scale, (*labels, (entry.label, value)) if entry.label else labels


@cache
def _tables(role: str) -> tuple[dict[str, FigureEntry], tuple[FigureEntry, ...]]:
    """Rows by their source, and those with a `*`, the longest first: entry_refused_* before refused_*."""
    entries = (*_OF_ROLE.get(role, ()), *COMMON)
    patterns = sorted((one for one in entries if "*" in one.source), key=lambda one: -len(one.source))
    return {one.source: one for one in entries if "*" not in one.source}, tuple(patterns)


@cache
def _histogram_helps() -> dict[str, str]:
    return {entry.name: entry.help for entry in HISTOGRAMS}


def _kind(name: str) -> Kind:
    return Kind.COUNTER if name.endswith("_total") else Kind.GAUGE

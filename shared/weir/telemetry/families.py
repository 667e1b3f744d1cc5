"""What is exported: families of samples by name, whoever renders them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from weir.telemetry.histogram import HistogramValue


class Kind(StrEnum):
    """Of a metric, in Prometheus' words."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Sample:
    """One series now. `labels` as pairs, in the order that is shown."""

    value: float | HistogramValue
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    """All series of one name. The name of a counter ends in `_total`."""

    name: str
    kind: Kind
    help: str
    samples: tuple[Sample, ...] = field(default=())


def gathered(families: Iterable[Family]) -> list[Family]:
    """Those of one name as one, in the order of their names. Of the same labels the last sample counts: nobody takes a
    page that has a series twice."""
    by_name: dict[str, list[Family]] = {}
    for family in families:
        by_name.setdefault(family.name, []).append(family)
    return [_as_one(by_name[name]) for name in sorted(by_name)]


def _as_one(families: Sequence[Family]) -> Family:
    samples = {sample.labels: sample for family in families for sample in family.samples}
    return replace(families[0], samples=tuple(samples.values()))

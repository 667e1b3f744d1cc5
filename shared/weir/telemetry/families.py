"""What is exported: families of samples by name, whoever renders them."""

from collections.abc import Iterable, Mapping, Sequence
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

    @property
    def num_lines(self) -> int:
        """That it is rendered as, about."""
        sizes = (len(s.value.counts) + 2 if isinstance(s.value, HistogramValue) else 1 for s in self.samples)
        return 2 + sum(sizes)


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


def labelled(samples: Iterable[Sample], labels: Mapping[str, str]) -> tuple[Sample, ...]:
    """With these labels too."""
    more = tuple(labels.items())
    return tuple(Sample(sample.value, (*sample.labels, *more)) for sample in samples)

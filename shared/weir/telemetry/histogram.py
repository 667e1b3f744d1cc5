"""Histograms of fixed buckets on plain lists: what is counted on the path of a token.

    edges      0.5   1    2.5             a value belongs to the first edge that is not below it
    counts   [ a  |  b  |  c  |  d ]      one more than edges: d is above them all

prometheus-client's own take eight times as long (adr/0058).
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple


class Exemplar(NamedTuple):
    """One observed value, and the trace that it was seen in."""

    value: float
    trace_id: str
    """32 hexadecimal digits."""
    at_s: float
    """Unix time."""


@dataclass(frozen=True, slots=True)
class HistogramValue:
    """What a histogram held at one moment. `counts` are of single buckets, not cumulative."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    total: float
    exemplars: tuple[Exemplar | None, ...] = ()
    """One a bucket; or none at all."""

    @property
    def num(self) -> int:
        return sum(self.counts)

    @property
    def cumulative(self) -> list[int]:
        """Values at or below each edge, and last of all."""
        return list(accumulate(self.counts))

    def coarser(self, edges: Sequence[float]) -> "HistogramValue":
        """The same values in fewer buckets. Raises ValueError for an edge that this one does not have."""
        counts = [0] * (len(edges) + 1)
        exemplars: list[Exemplar | None] = [None] * len(counts)
        if unknown := sorted(set(edges) - set(self.edges)):
            raise ValueError(f"edges {unknown}: none of the histogram's own {list(self.edges)}")
        for index, count in enumerate(self.counts):
            place = bisect_left(edges, self.edges[index]) if index < len(self.edges) else len(edges)
            counts[place] += count
            if self.exemplars:
                exemplars[place] = newest(exemplars[place], self.exemplars[index])
        return HistogramValue(tuple(edges), tuple(counts), self.total, tuple(exemplars) if self.exemplars else ())


def newest(one: Exemplar | None, other: Exemplar | None) -> Exemplar | None:
    """Of two exemplars of a bucket."""
    if one is None or other is None:
        return one or other
    return max(one, other, key=lambda exemplar: exemplar.at_s)


def added(values: Sequence[HistogramValue]) -> HistogramValue:
    """Several as one; at least one, all with the same edges. Raises ValueError."""
    first = values[0]
    if any(value.edges != first.edges for value in values):
        raise ValueError("histograms of different edges cannot be added")
    counts = tuple(map(sum, zip(*(value.counts for value in values), strict=True)))
    exemplars: list[Exemplar | None] = [None] * len(counts)
    for value in values:
        if value.exemplars:
            exemplars = [newest(one, other) for one, other in zip(exemplars, value.exemplars, strict=True)]
    has_exemplars = any(exemplar is not None for exemplar in exemplars)
    total = sum(value.total for value in values)
    return HistogramValue(first.edges, counts, total, tuple(exemplars) if has_exemplars else ())


class Histogram:
    """Counts values since it was made. In one thread alone."""

    __slots__ = ("_counts", "_edges", "_exemplars", "_total")

    def __init__(self, edges: Sequence[float]) -> None:
        """Raises ValueError unless the edges rise and there is one."""
        if not edges or any(low >= high for low, high in pairwise(edges)):
            raise ValueError(f"edges {list(edges)}: must rise, and be at least one")
        self._edges = tuple(edges)
        self._counts = [0] * (len(edges) + 1)
        self._total = 0.0
        self._exemplars: dict[int, Exemplar] = {}
        """By bucket; the newest."""

    def observe(self, value: float, num: int = 1) -> None:
        """The same value `num` times."""
        self._counts[bisect_left(self._edges, value)] += num
        self._total += value * num

    def observe_traced(self, value: float, trace_id: str, at_s: float) -> None:
        """Once, with what led to it; an empty `trace_id` says that no trace was sampled."""
        bucket = bisect_left(self._edges, value)
        self._counts[bucket] += 1
        self._total += value
        if trace_id:
            self._exemplars[bucket] = Exemplar(value, trace_id, at_s)

    def value(self) -> HistogramValue:
        exemplars = tuple(map(self._exemplars.get, range(len(self._counts)))) if self._exemplars else ()
        return HistogramValue(self._edges, tuple(self._counts), self._total, exemplars)

"""Sums of counters over processes that come and go."""

from collections import OrderedDict
from collections.abc import Mapping

from weir.telemetry.histogram import HistogramValue

_MAX_REMEMBERED = 1024


class SteadySums:
    """They never fall: what processes that are gone had counted stays in, or whoever draws a rate would see a restart.

    A process has a new id at each start, so that its last value is its last.
    """

    def __init__(self, max_remembered: int = _MAX_REMEMBERED) -> None:
        self._max_remembered = max_remembered
        self._known: dict[str, OrderedDict[str, float]] = {}
        """By name and process; the one heard last comes last."""
        self._forgotten: dict[str, float] = {}

    def of(self, name: str, values: Mapping[str, float]) -> float:
        """Of one counter, by process; those that are left out may come back."""
        known = self._known.setdefault(name, OrderedDict())
        for process, value in values.items():
            known[process] = value
            known.move_to_end(process)
        while len(known) > self._max_remembered:
            self._forgotten[name] = self._forgotten.get(name, 0.0) + known.popitem(last=False)[1]
        return sum(known.values()) + self._forgotten.get(name, 0.0)

    def of_histograms(
        self, name: str, values: Mapping[str, HistogramValue], edges: tuple[float, ...]
    ) -> HistogramValue | None:
        """The same of histograms. Those with other edges, as a process of another release may have, are left out.
        None: there are none now."""
        known = {process: one for process, one in values.items() if one.edges == edges}
        if not known:
            return None
        counts = [
            int(self.of(f"{name} {bucket}", {process: float(one.counts[bucket]) for process, one in known.items()}))
            for bucket in range(len(edges) + 1)
        ]
        total = self.of(f"{name} total", {process: one.total for process, one in known.items()})
        return HistogramValue(edges, tuple(counts), total)

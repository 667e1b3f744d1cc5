"""What an experiment is: cases to run with each seed, figures to show, and checks of what they must come to.

A case is one arm (what is compared) at one point (where on the sweep: a load, an SLO). Arms of one point and seed must
see the same arrivals and lengths, so that ratios can be taken seed by seed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import sub, truediv

from weir.sim.results.metrics import Estimate, mean_estimate


@dataclass(frozen=True, slots=True)
class Row:
    """What one case gave with one seed."""

    arm: str
    point: str
    x: float | None
    seed: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Results:
    """`rows` in the order of the cases, then of the seeds."""

    rows: Sequence[Row]

    def arms(self) -> list[str]:
        return list(dict.fromkeys(row.arm for row in self.rows))

    def points(self, arm: str | None = None) -> list[str]:
        return list(dict.fromkeys(row.point for row in self.rows if arm in (None, row.arm)))

    def values(self, figure: str, arm: str, point: str = "") -> list[float]:
        """One for each seed. Raises KeyError, naming what is missing."""
        found = [row.values for row in self.rows if row.arm == arm and row.point == point]
        if not found:
            raise KeyError(f"no rows of arm {arm!r} at point {point!r}; arms: {self.arms()}, points: {self.points()}")
        return [values[figure] for values in found]

    def estimate(self, figure: str, arm: str, point: str = "") -> Estimate:
        return mean_estimate(self.values(figure, arm, point))

    def ratio(self, figure: str, arm: str, base: str, point: str = "", *, base_point: str | None = None) -> Estimate:
        """Of `arm` over `base`, seed by seed: both saw the same arrivals. `base_point` None: `point` as well."""
        return self._paired(truediv, figure, (arm, point), (base, point if base_point is None else base_point))

    def difference(self, figure: str, arm: str, base: str, point: str = "") -> Estimate:
        """`arm` minus `base`, seed by seed."""
        return self._paired(sub, figure, (arm, point), (base, point))

    def _paired(
        self, combine: Callable[[float, float], float], figure: str, one: tuple[str, str], other: tuple[str, str]
    ) -> Estimate:
        pairs = zip(self.values(figure, *one), self.values(figure, *other), strict=True)
        return mean_estimate([combine(value, base) for value, base in pairs])


class Size(StrEnum):
    """SMALL runs in seconds and shows the same thing coarsely; FULL is what is kept."""

    SMALL = "small"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Figure:
    """One column. `name` is the key in what a case returns and ends in its unit, `label` the heading."""

    name: str
    label: str
    digits: int = 3


@dataclass(frozen=True, slots=True)
class Case:
    """`run(seed)` returns figure -> value. `x` places the point on the horizontal axis of a plot."""

    arm: str
    run: Callable[[int], Mapping[str, float]]
    point: str = ""
    x: float | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """What the results are asked to come to. One bound or both; what misses it is reported, never hidden.

    `sizes`: a small run is too coarse for some checks.
    """

    claim: str
    measure: Callable[[Results], Estimate]
    at_least: float | None = None
    at_most: float | None = None
    sizes: tuple[Size, ...] = (Size.SMALL, Size.FULL)

    def is_met(self, estimate: Estimate) -> bool:
        """By the mean over the seeds; its interval is shown beside it."""
        return (self.at_least is None or estimate.mean >= self.at_least) and (
            self.at_most is None or estimate.mean <= self.at_most
        )


@dataclass(frozen=True, slots=True)
class SweepPlot:
    """One figure over `x`, a line an arm with its interval."""

    figure: str
    x_label: str
    is_log: bool = False


def _nothing(results: Results) -> Sequence[str]:
    return ()


@dataclass(frozen=True, slots=True)
class Experiment:
    """`cases(size)` is cheap, reads no trace, and gives the same cases in the same order every time: workers of the
    runner call it again and pick theirs by its number."""

    name: str
    title: str
    claim: str
    """What is to be shown, and where it comes from."""
    compared: str
    """Arms, workload, system; what is held equal."""
    cases: Callable[[Size], Sequence[Case]]
    figures: Sequence[Figure]
    checks: Sequence[Check] = ()
    findings: Callable[[Results], Sequence[str]] = _nothing
    """Sentences with figures taken from the results, losses included."""
    plots: Sequence[SweepPlot] = ()
    traces: Sequence[str] = ()
    """Files that it needs in the folder `traces` of WEIR_TEST_DATA."""
    full_traces: Sequence[str] = ()
    """Those that the full size needs besides."""
    num_seeds: Mapping[Size, int] | None = None
    """None: 2 small, 5 full."""

    def traces_of(self, size: Size) -> tuple[str, ...]:
        return (*self.traces, *(self.full_traces if size is Size.FULL else ()))

    def seeds(self, size: Size) -> range:
        given = self.num_seeds or {}
        return range(given.get(size, 2 if size is Size.SMALL else 5))

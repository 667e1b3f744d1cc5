"""The rows of an experiment, and what is asked of them: estimates over seeds, ratios and differences seed by seed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from weir.sim.results.stats import Estimate, mean_estimate


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

    def ratio(self, figure: str, arm: str, base: str, point: str = "") -> Estimate:
        """Of `arm` over `base`, seed by seed: both saw the same arrivals."""
        return self._paired(figure, (arm, point), (base, point), lambda value, base_value: value / base_value)

    def difference(self, figure: str, arm: str, base: str, point: str = "") -> Estimate:
        """`arm` minus `base`, seed by seed."""
        return self._paired(figure, (arm, point), (base, point), lambda value, base_value: value - base_value)

    def ratio_between_points(self, figure: str, arm: str, point: str, base_point: str) -> Estimate:
        """Of one arm at one point over itself at another, seed by seed."""
        return self._paired(figure, (arm, point), (arm, base_point), lambda value, base_value: value / base_value)

    def _paired(
        self,
        figure: str,
        one: tuple[str, str],
        other: tuple[str, str],
        combine: Callable[[float, float], float],
    ) -> Estimate:
        pairs = zip(self.values(figure, *one), self.values(figure, *other), strict=True)
        return mean_estimate([combine(value, base_value) for value, base_value in pairs])

"""What an experiment is: cases to run with each seed, figures to show, and checks of what they must come to.

A case is one arm (what is compared) at one point (where on the sweep: a load, an SLO). Arms of one point and seed must
see the same arrivals and lengths, so that ratios can be taken seed by seed.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from benchmarks.sim.results import Results
from weir.bench.simulator import DATA_VARIABLE
from weir.sim.results.stats import Estimate


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
    num_seeds: Mapping[Size, int] | None = None
    """None: 2 small, 5 full."""

    def seeds(self, size: Size) -> range:
        given = self.num_seeds or {}
        return range(given.get(size, 2 if size is Size.SMALL else 5))


class TracesMissing(Exception):
    """The experiment needs trace files that are not on this machine."""


def traces_folder() -> Path:
    """Where traces are. Raises TracesMissing."""
    root = os.environ.get(DATA_VARIABLE)
    if not root:
        raise TracesMissing(f"{DATA_VARIABLE} is not set: a folder whose folder `traces` has the trace files")
    return Path(root) / "traces"


def check_traces(experiment: Experiment) -> None:
    """Raises TracesMissing, naming the files."""
    if not experiment.traces:
        return
    folder = traces_folder()
    missing = [name for name in experiment.traces if not (folder / name).is_file()]
    if missing:
        raise TracesMissing(f"{folder} lacks {', '.join(missing)}")

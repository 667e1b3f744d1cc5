"""Every experiment, small: it runs, and what it checks at that size holds. Simulated time, so nothing here is timed."""

import pytest

from benchmarks.sim.experiment import Size
from benchmarks.sim.report import bound, measured_checks, show
from benchmarks.sim.runner import experiment_names, load_experiment, run_experiment
from benchmarks.traces import TracesMissing, traces_folder

_LONG = ("ltr-states", "ltr-turns")
"""By predicted lengths, as ltr-trained, which takes less."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in _LONG else ()) for name in experiment_names()]
)
def test_a_small_run_shows_what_is_claimed(name: str) -> None:
    experiment = load_experiment(name)
    if traces := experiment.traces_of(Size.SMALL):
        try:
            traces_folder(*traces)
        except TracesMissing as missing:
            pytest.skip(str(missing))
    results = run_experiment(experiment, Size.SMALL)
    checks = measured_checks(experiment, results, Size.SMALL)
    assert checks, "an experiment without a check cannot fail"
    missed = [
        f"{check.claim}: {show(estimate)}, asked {bound(check)}"
        for check, estimate in checks
        if not check.is_met(estimate)
    ]
    assert missed == []
    assert all(isinstance(sentence, str) for sentence in experiment.findings(results))

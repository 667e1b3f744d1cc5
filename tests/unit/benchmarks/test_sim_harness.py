"""The harness of experiments, on experiments whose figures are known."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from benchmarks.sim.experiment import Case, Check, Experiment, Figure, Results, Row, Size, SweepPlot
from benchmarks.sim.report import as_markdown, show, write_results
from benchmarks.sim.runner import experiment_names, load_experiment, run_case, run_experiment
from benchmarks.traces import TracesMissing
from weir.sim.results.metrics import Estimate, mean_estimate


def delay(arm: str, load: float, seed: int) -> Mapping[str, float]:
    """Noise that both arms share: their ratio is exact though each moves."""
    noise = float(np.random.default_rng(seed).uniform(1, 10))
    return {"delay_s": noise * load * (0.5 if arm == "new" else 1.0)}


def cases(size: Size) -> list[Case]:
    loads = (1.0,) if size is Size.SMALL else (1.0, 2.0)
    return [
        Case(arm, lambda seed, arm=arm, load=load: delay(arm, load, seed), f"load {load:g}", load)  # type: ignore[misc]
        for load in loads
        for arm in ("old", "new")
    ]


EXPERIMENT = Experiment(
    name="delays",
    title="Delays",
    claim="New is twice as fast.",
    compared="old | new",
    cases=cases,
    figures=(Figure("delay_s", "delay s"),),
    checks=(
        Check("new over old", lambda r: r.ratio("delay_s", "new", "old", "load 1"), at_most=0.5),
        Check("asks too much", lambda r: r.ratio("delay_s", "new", "old", "load 1"), at_least=2, sizes=(Size.FULL,)),
    ),
    findings=lambda r: [f"old waits {show(r.estimate('delay_s', 'old', 'load 1'))} s"],
    plots=(SweepPlot("delay_s", "load"),),
)


def test_every_case_runs_with_every_seed_in_order() -> None:
    progress: list[tuple[int, int]] = []
    results = run_experiment(EXPERIMENT, Size.FULL, on_progress=lambda done, total: progress.append((done, total)))
    assert [(row.arm, row.point, row.seed) for row in results.rows] == [
        (arm, point, seed) for point in ("load 1", "load 2") for arm in ("old", "new") for seed in range(5)
    ]
    assert progress == [(done, 20) for done in range(1, 21)]


def test_ratios_are_taken_seed_by_seed() -> None:
    results = run_experiment(EXPERIMENT, Size.FULL)
    single = results.estimate("delay_s", "old", "load 1")
    ratio = results.ratio("delay_s", "new", "old", "load 1")
    assert single.high - single.low > 1
    assert (ratio.mean, ratio.high - ratio.low) == (0.5, 0.0)
    assert results.ratio("delay_s", "old", "old", "load 2", base_point="load 1").mean == pytest.approx(2)
    assert results.difference("delay_s", "new", "old", "load 1").mean == pytest.approx(-single.mean / 2)


def test_asking_for_an_arm_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(KeyError, match=r"no rows of arm 'newer'.*old.*load 1"):
        run_experiment(EXPERIMENT, Size.SMALL).estimate("delay_s", "newer", "load 1")


def test_a_check_that_is_missed_is_written_down_as_missed(tmp_path: Path) -> None:
    results = run_experiment(EXPERIMENT, Size.FULL)
    markdown, data, picture = write_results(EXPERIMENT, results, Size.FULL, tmp_path / "new folder")
    text = markdown.read_text()
    assert "| new over old | ≤ 0.5 | 0.500 ± 0.000 | yes |" in text
    assert "| asks too much | ≥ 2 | 0.500 ± 0.000 | **no** |" in text
    assert "`python -m benchmarks.sim delays --size full`" in text
    assert "Seeds 0 to 4" in text
    written = json.loads(data.read_text())
    assert [check["is_met"] for check in written["checks"]] == [True, False]
    assert len(written["rows"]) == 20
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_small_run_is_not_asked_what_only_a_full_one_can_show() -> None:
    text = as_markdown(EXPERIMENT, run_experiment(EXPERIMENT, Size.SMALL), Size.SMALL)
    assert "new over old" in text
    assert "asks too much" not in text


def test_results_come_out_the_same_to_the_byte(tmp_path: Path) -> None:
    first = write_results(EXPERIMENT, run_experiment(EXPERIMENT, Size.FULL), Size.FULL, tmp_path / "one")
    again = write_results(EXPERIMENT, run_experiment(EXPERIMENT, Size.FULL), Size.FULL, tmp_path / "two")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]


def test_an_interval_does_not_move_a_check_its_mean_does() -> None:
    check = Check("some", lambda r: mean_estimate([1.0]), at_least=1.0, at_most=2.0)
    assert check.is_met(Estimate(1.0, -5.0, 7.0, 5))
    assert not check.is_met(Estimate(0.99, 0.98, 1.5, 5))
    assert not check.is_met(Estimate(2.01, 0.0, 3.0, 5))
    assert not check.is_met(Estimate(math.nan, math.nan, math.nan, 5))


def test_missing_traces_are_named_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needy = dataclasses.replace(EXPERIMENT, traces=("none.csv",))
    monkeypatch.delenv("WEIR_TEST_DATA", raising=False)
    with pytest.raises(TracesMissing, match="WEIR_TEST_DATA is not set"):
        run_experiment(needy, Size.SMALL)
    monkeypatch.setenv("WEIR_TEST_DATA", str(tmp_path))
    with pytest.raises(TracesMissing, match=r"traces lacks none\.csv"):
        run_experiment(needy, Size.SMALL)


def test_traces_that_only_a_full_run_needs_are_asked_of_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    needy = dataclasses.replace(EXPERIMENT, full_traces=("none.csv",))
    monkeypatch.delenv("WEIR_TEST_DATA", raising=False)
    results = run_experiment(needy, Size.SMALL)
    assert "`python -m benchmarks.sim delays --size small`" in as_markdown(needy, results, Size.SMALL)
    assert "`WEIR_TEST_DATA=DIR python -m benchmarks.sim delays --size full`" in as_markdown(needy, results, Size.FULL)
    with pytest.raises(TracesMissing, match="WEIR_TEST_DATA is not set"):
        run_experiment(needy, Size.FULL)


def test_a_case_that_breaks_says_which_it_was() -> None:
    def broken(seed: int) -> Mapping[str, float]:
        raise ZeroDivisionError(seed)

    experiment = dataclasses.replace(EXPERIMENT, cases=lambda size: [Case("bad", broken, "here")])
    with pytest.raises(ZeroDivisionError) as caught:
        run_experiment(experiment, Size.SMALL)
    assert caught.value.__notes__ == ["in delays, arm 'bad', point 'here', seed 0"]


@pytest.mark.parametrize(("values", "problem"), [({}, "returned no delay_s"), ({"delay_s": math.nan}, "not a number")])
def test_a_figure_that_is_not_there_is_an_error(values: Mapping[str, float], problem: str) -> None:
    experiment = dataclasses.replace(EXPERIMENT, cases=lambda size: [Case("bad", lambda seed: values)])
    with pytest.raises(ValueError, match=problem):
        run_case(experiment, Size.SMALL, 0, 0)


def test_numbers_are_shown_to_their_digits() -> None:
    assert show(Estimate(1234.5, 1200.0, 1269.0, 5)) == "1,234 ± 34"
    assert show(Estimate(0.012345, 0.0113, 0.0134, 5)) == "0.0123 ± 0.0011"
    assert show(Estimate(0.0, 0.0, 0.0, 5)) == "0.00 ± 0.00"
    assert show(Estimate(2.5, -math.inf, math.inf, 1)) == "2.50"


def test_a_pipe_in_a_cell_does_not_break_the_table() -> None:
    results = Results((Row("a|b", "", None, 0, {"delay_s": 1.0}),))
    assert "| a/b |" in as_markdown(
        dataclasses.replace(EXPERIMENT, checks=(), findings=lambda r: ()), results, Size.FULL
    )


def test_an_unknown_experiment_is_told_which_there_are() -> None:
    with pytest.raises(ValueError, match="experiment 'nothing': is none of"):
        load_experiment("nothing")
    assert not any(name.startswith("_") for name in experiment_names())

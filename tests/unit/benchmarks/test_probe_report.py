"""What probes came to is shown whole, and what a report needs is looked for before it takes hours."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.predictors.agreement import Agreement
from benchmarks.predictors.data import kept_lengths
from benchmarks.predictors.probe import report
from benchmarks.predictors.probe_report import ProbesReport, probes_as_json, probes_as_markdown
from benchmarks.predictors.state_probes import AgeResult, StartResult
from benchmarks.predictors.turns import TurnsResult
from benchmarks.traces import TracesMissing


def tau(value: float) -> Agreement:
    """± 0.196: of two groups, each 0.1 from the mean."""
    return Agreement(value, np.array([value - 0.1, value + 0.1]))


REPORT = ProbesReport(
    num_seeds=3,
    starts=[
        StartResult(
            "made up",
            40,
            {"last": tau(0.5), "today": tau(0.2), "today, ridge": tau(0.3)},
            {"last, layer 15": 2, "last, layer 22": 13},
        )
    ],
    ages={
        "made up, own": [
            AgeResult(32, 30, {"both": tau(0.4), "survived": tau(0.1), "first": tau(0.25)}),
            AgeResult(None, 40, {"both": tau(0.45), "survived": tau(0.1), "first": tau(0.25)}),
        ]
    },
    turns={"trace": TurnsResult(90, 25, tau(-0.01), tau(0.6), tau(0.61), tau(0.05), tau(0.55))},
    state_ms_a_token=0.347,
    cost_layer=22,
)


def row_of(markdown: str, *beginning: str) -> list[str]:
    """The cells of the only line of a table that begins so."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines()]
    (found,) = (row for row in rows if tuple(row[: len(beginning)]) == beginning)
    return found


def test_the_page_has_a_row_for_each_set_age_and_trace_as_wide_as_its_head() -> None:
    page = probes_as_markdown(REPORT)
    start = dict(zip(row_of(page, "data set", "prompts"), row_of(page, "made up", "40"), strict=True))
    assert (start["last"], start["today"], start["mean"]) == ("0.500 ± 0.196", "0.200 ± 0.196", "n/a")
    assert row_of(page, "made up", "0.200 ± 0.000") == ["made up", "0.200 ± 0.000", "0.300 ± 0.000", "22 (13), 15 (2)"]
    head = row_of(page, "data set", "after")
    for after, num_answers, both in (("32", "30", "0.400 ± 0.196"), ("mixed", "40", "0.450 ± 0.196")):
        age = dict(zip(head, row_of(page, "made up, own", after), strict=True))
        assert (age["answers"], age["both"], age["now"]) == (num_answers, both, "n/a")
    assert row_of(page, "made up, own", "32")[-2:] == ["0.300 ± 0.000", "0.150 ± 0.000"]
    turns = dict(zip(row_of(page, "data set", "requests"), row_of(page, "trace"), strict=True))
    assert (turns["later turns"], turns["network"], turns["gain of `network`"]) == (
        "25",
        "0.550 ± 0.196",
        "0.500 ± 0.000",
    )
    for _, table in itertools.groupby(page.splitlines(), lambda line: line.startswith("|")):
        assert len({line.count("|") for line in table if line.startswith("|")}) <= 1
    assert "after 22 layers takes 0.35 ms of one core" in page


def test_the_file_has_the_same_figures() -> None:
    content = json.loads(probes_as_json(REPORT))
    assert content["state_ms_a_token"] == 0.347
    assert content["starts"][0]["taus"]["last"]["tau"] == 0.5
    assert content["ages"]["made up, own"][1]["age"] is None
    assert content["turns"]["trace"]["taus"]["network"]["half_width"] == pytest.approx(0.196, abs=1e-3)


def test_a_report_asks_for_its_other_files_before_all_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIR_TEST_DATA", str(tmp_path))
    with pytest.raises(TracesMissing, match=r"lacks humaneval\.jsonl\.gz, mooncake_conversation\.jsonl\.gz"):
        report(tmp_path)


def test_states_of_answers_that_nobody_made_say_who_makes_them() -> None:
    with pytest.raises(ValueError, match=r"answers to alpaca_eval: none are kept, .*`probe answers` makes them"):
        kept_lengths("alpaca_eval")

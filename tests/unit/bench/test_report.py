"""How a benchmark ends."""

import json
from pathlib import Path

import pytest
from rich.table import Table

from weir.bench.quality import main as bench_quality
from weir.bench.report import run_and_print


def measured() -> int:
    return 7


def impossible() -> int:
    raise OSError("no such machine")


def run(json_output: bool, is_possible: bool = True) -> int:
    return run_and_print(
        "weir bench nothing",
        measured if is_possible else impossible,
        as_dict=lambda number: {"number": number},
        tables=lambda number: [Table("number"), f"it is {number}"],
        json_output=json_output,
        errors=(OSError,),
    )


def test_a_report_is_printed_as_its_tables_or_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(json_output=False) == 0
    printed = capsys.readouterr().out
    assert "number" in printed
    assert printed.endswith("it is 7\n")
    assert run(json_output=True) == 0
    assert json.loads(capsys.readouterr().out) == {"number": 7}


def test_what_cannot_be_measured_here_is_a_line_and_the_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(json_output=True, is_possible=False) == 1
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "weir bench nothing: no such machine\n")


def test_a_text_without_a_second_token_has_no_perplexity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").write_text("")
    assert bench_quality("smollm2-135m", tmp_path / "empty.txt") == 1
    assert "the text has 0 tokens: at least 2 are needed" in capsys.readouterr().err

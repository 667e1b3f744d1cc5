"""How a benchmark ends."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.table import Table

from weir.bench import batching, profile, quality, step
from weir.bench.report import run_and_print
from weir.core.file_lock import StillLocked


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


def test_no_figure_of_a_wide_table_is_cut(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    table = Table(*(f"column-{number}" for number in range(12)), title="a title of many words " * 5)
    table.add_row(*(f"{number}00,000.5" for number in range(12)))
    run_and_print("weir bench wide", measured, as_dict=lambda _: {}, tables=lambda _: [table], json_output=False)
    printed = capsys.readouterr().out
    assert [name for name in (f"column-{number}" for number in range(12)) if name not in printed] == []
    assert [text for text in (f"{number}00,000.5" for number in range(12)) if text not in printed] == []


def test_what_cannot_be_measured_here_is_a_line_and_the_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(json_output=True, is_possible=False) == 1
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "weir bench nothing: no such machine\n")


BENCHMARKS: dict[str, Callable[[Path], int]] = {
    "step": lambda _: step.main("m"),
    "batching": lambda folder: batching.main(batching.BatchingConfig("m", folder / "lengths"), json_output=False),
    "quality": lambda folder: quality.main("m", folder / "text"),
    "profile": lambda _: profile.main("m", "auto", 1, 1, 1, None),
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_model_that_another_process_packs_for_ever_is_a_line_and_no_traceback(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wait_in_vain(*_: object) -> None:
        raise StillLocked("packing m: another process has held it")

    (tmp_path / "text").write_text("words")
    monkeypatch.setattr(f"weir.bench.{name}.measure", wait_in_vain)
    assert BENCHMARKS[name](tmp_path) == 1
    assert "packing m: another process has held it" in capsys.readouterr().err


def test_a_text_without_a_second_token_has_no_perplexity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").write_text("")
    assert quality.main("smollm2-135m", tmp_path / "empty.txt") == 1
    assert "the text has 0 tokens: at least 2 are needed" in capsys.readouterr().err

"""The files of `weir generate --input --output`."""

import json
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from weir.cli.generate import PromptLine, keep_answered, read_jobs


def answer(key: str | int) -> dict[str, object]:
    return {"id": key, "text": f"text of {key}: é\u2028\x85…\n", "finish_reason": "stop"}


def test_jobs_are_named_by_their_id_or_their_line_number(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n\n{"prompt": [1, 2], "id": "x"}\n{"prompt": "b"}\n')
    assert read_jobs(source) == [PromptLine(1, "a"), PromptLine("x", [1, 2]), PromptLine(4, "b")]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "not JSON"),
        ("\xff", "not JSON"),
        ("[]", '"prompt"'),
        ('{"prompt": 5}', '"prompt"'),
        ('{"prompt": [-1]}', '"prompt"'),
        ('{"prompt": [1, true]}', '"prompt"'),
        ('{"prompt": "a", "id": 1.5}', '"id"'),
        ('{"prompt": "a", "id": true}', '"id"'),
        ('{"prompt": "a", "max_tokens": 4}', '"max_tokens" is for all lines: give it on the command line'),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, named: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"prompt": "fine"}\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(typer.Exit) as ended:
        read_jobs(source)
    assert ended.value.exit_code == 2
    shown = capsys.readouterr().err
    assert "line 2" in shown
    assert named in shown


def test_an_id_that_comes_twice_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a", "id": "x"}\n{"prompt": "b", "id": "x"}\n')
    with pytest.raises(typer.Exit):
        read_jobs(source)
    assert "'x' comes twice" in capsys.readouterr().err


@given(
    keys=st.lists(
        st.integers(0, 50) | st.text(st.characters(codec="utf-8"), min_size=1, max_size=5), unique=True, max_size=8
    ),
    data=st.data(),
)
def test_a_file_cut_anywhere_keeps_exactly_its_whole_answers(
    tmp_path_factory: pytest.TempPathFactory, keys: list[str | int], data: st.DataObject
) -> None:
    target = tmp_path_factory.mktemp("cut") / "out.jsonl"
    lines = [json.dumps(answer(key), ensure_ascii=False) + "\n" for key in keys]
    whole = "".join(lines).encode()
    cut = data.draw(st.integers(0, len(whole)))
    target.write_bytes(whole[:cut])

    kept = keep_answered(target)

    ends = [len("".join(lines[: number + 1]).encode()) - 1 for number in range(len(lines))]
    assert kept == {key for key, end in zip(keys, ends, strict=True) if end <= cut}
    left = [json.loads(line)["id"] for line in target.read_bytes().splitlines()]
    assert left == [key for key in keys if key in kept]


def test_failed_lines_are_dropped_so_that_they_are_tried_again(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    target.write_text(json.dumps(answer(1)) + "\n" + json.dumps({"id": 2, "error": "no worker"}) + "\n")
    assert keep_answered(target) == {1}
    assert "no worker" not in target.read_text()

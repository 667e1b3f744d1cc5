"""The log of changes: bounded, for its owner alone, and without anything that could be a key."""

import json
import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from weir.core.credentials import key_digest, make_key
from weir.core.errors import (
    FieldViolation,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
    WeirError,
)
from weir.runtime.change_log import Change, ChangeLog, Told, outcome_of, read_changes, shown_name, shown_value

DONE = Change("key:1a2b3c4d", "drain", "decode-0-aa", "done", "serving", "draining")
DENIED = Change("nobody", "call", "weir.v1.Admin/Drain", "denied", reason="Unauthenticated")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_says_who_did_what_and_the_file_is_its_owners_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "changes-a.jsonl"
    with caplog.at_level(logging.INFO):
        ChangeLog(path, "scheduler-0", now_s=lambda: 1.5).write(DONE)
    assert lines(path) == [
        {
            "time": "1970-01-01T00:00:01.500+00:00",
            "process": "scheduler-0",
            "actor": "key:1a2b3c4d",
            "action": "drain",
            "object": "decode-0-aa",
            "result": "done",
            "before": "serving",
            "after": "draining",
        }
    ]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (record,) = caplog.records
    assert (record.message, vars(record)["actor"]) == ("change", "key:1a2b3c4d")


def test_files_are_bounded_in_size_and_number_and_read_back_in_order(tmp_path: Path) -> None:
    seconds = iter(range(10_000))
    log = ChangeLog(tmp_path / "changes-a.jsonl", "a", max_bytes=1000, num_kept=2, now_s=lambda: float(next(seconds)))
    other = ChangeLog(tmp_path / "changes-b.jsonl", "b", now_s=lambda: 55.5)
    for _ in range(60):
        log.write(DONE)
    other.write(DONE)
    found = sorted(tmp_path.iterdir())
    assert [path.name for path in found] == [
        "changes-a.jsonl",
        "changes-a.jsonl.1",
        "changes-a.jsonl.2",
        "changes-b.jsonl",
    ]
    assert all(path.stat().st_size <= 1000 for path in found)
    changes = list(read_changes(tmp_path))
    assert [change["time"] for change in changes] == sorted(change["time"] for change in changes)
    assert [change["process"] for change in changes][-6:].index("b") == 1
    assert changes[-1]["time"].startswith("1970-01-01T00:00:59")
    assert len(changes) < 60


def test_denials_are_so_many_a_minute_and_the_next_line_counts_the_others(tmp_path: Path) -> None:
    path, now_s = tmp_path / "changes-a.jsonl", 0.0
    log = ChangeLog(path, "a", max_failures=3, now_s=lambda: now_s)
    for _ in range(10):
        log.write(DENIED)
    assert len(lines(path)) == 3
    log.write(DONE)
    assert lines(path)[-1] | {"num_failures_before": 7} == lines(path)[-1]
    log.write(DENIED)
    now_s = 60.0
    log.write(DENIED)
    assert [line.get("num_failures_before") for line in lines(path)] == [None, None, None, 7, 1]


def test_a_file_that_cannot_be_written_is_told_and_stops_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "changes-a.jsonl").symlink_to(elsewhere)
    log = ChangeLog(tmp_path / "changes-a.jsonl", "a")
    with caplog.at_level(logging.INFO):
        log.write(DONE)
    assert not elsewhere.exists()
    assert log.metrics() == {"changes_written_total": 0.0, "changes_lost_total": 1.0}
    assert "a change cannot be written" in caplog.text


def test_a_line_that_the_disk_cuts_is_taken_back_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "changes-a.jsonl"
    log = ChangeLog(path, "a")
    log.write(DONE)
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:7]))
    log.write(DONE)
    monkeypatch.undo()
    log.write(DONE)
    assert len(lines(path)) == 2
    assert log.metrics() == {"changes_written_total": 2.0, "changes_lost_total": 1.0}


def test_a_pipe_that_nobody_reads_stops_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "changes-a.jsonl")
    log = ChangeLog(tmp_path / "changes-a.jsonl", "a")
    log.write(DONE)
    assert log.num_lost == 1


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (Unauthenticated("x"), ("denied", "Unauthenticated")),
        (PermissionDenied("x"), ("denied", "PermissionDenied")),
        (InvalidRequest([FieldViolation("policy", "x")]), ("refused", "InvalidRequest: policy")),
        (NotFound("worker_id", "x"), ("refused", "NotFound")),
        (Unavailable("x"), ("uncertain", "Unavailable")),
    ],
)
def test_what_is_not_done_has_a_kind_and_no_words_of_who_asked(error: WeirError, outcome: tuple[str, str]) -> None:
    assert outcome_of(error) == outcome


def test_a_key_in_the_wrong_place_is_not_repeated(tmp_path: Path) -> None:
    key, path = make_key(), tmp_path / "changes-a.jsonl"
    log = ChangeLog(path, "a")
    refusal = InvalidRequest([FieldViolation(key, f"{key} is no setting")])
    log.write_failure("here", "set limits", [key, f"tenants.{key}"], refusal, "c")
    digest = key_digest(key).hex()
    told = [Told(f"tenants.{key}.weight", "1", "2"), Told("tenants.acme.api_key_digests", "[]", f'["{digest}"]')]
    log.write_all("here", "set limits", told, "c")
    text = path.read_text()
    assert key not in text
    assert digest not in text
    assert lines(path)[-1]["after"] == f'["{digest[:8]}"]'


def test_names_of_settings_and_workers_are_shown_as_they_are() -> None:
    for name in ("lanes.batch.max_queued", "decode-0-1a2b3c4d", "weir.v1.Admin/Drain", "Qwen/Qwen2.5-0.5B"):
        assert shown_name(name) == name
    for name in ("", "two words", "line\nbreak", make_key(), "x" * 201):
        assert shown_name(name) == "(not a name)"
    assert len(shown_value("y" * 5000)) == 200

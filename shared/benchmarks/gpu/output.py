"""The six files that a run of `make gpu` leaves, each of use although the run was cut off at any moment.

summary.md      rewritten after each part
all.log         what every process printed, as it came
results.jsonl   one line a result, written when it is known
tests.log       what the tests printed
profile.txt     where the time of a step goes
env.txt         the machine
"""

import json
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUMMARY, ALL_LOG, RESULTS = "summary.md", "all.log", "results.jsonl"
TESTS_LOG, PROFILE, ENVIRONMENT = "tests.log", "profile.txt", "env.txt"
FILES = (SUMMARY, ALL_LOG, RESULTS, TESTS_LOG, PROFILE, ENVIRONMENT)

_MAX_LOG_BYTES = 8 << 20
_MAX_PROBLEM_CHARS = 600
_MAX_CELL_CHARS = 160
_OWN_KEYS = ("part", "case", "verdict", "seconds")

Record = Mapping[str, Any]
"""One result: `part`, `case`, `verdict` (ok, failed, skipped, or how its process ended), and figures by name."""


def append(path: Path, text: str) -> None:
    """In one write, at the end: processes that write at the same time do not mix their lines."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, text.encode(errors="replace"))
    finally:
        os.close(descriptor)


def append_record(folder: Path, record: Record) -> None:
    append(folder / RESULTS, json.dumps(dict(record)) + "\n")


def short_problem(error: BaseException) -> str:
    """For a record; the traceback goes to the log."""
    return f"{type(error).__name__}: {error}".strip()[:_MAX_PROBLEM_CHARS]


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Lines that are no records, as a process leaves that dies while it writes, are left out."""
    records = []
    for line in (folder / RESULTS).read_text(errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "part" in record and "case" in record:
            records.append(record)
    return records


class Logs:
    """`all.log` and `tests.log`, of at most 8 MiB each. Threads may share it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._left = dict.fromkeys((ALL_LOG, TESTS_LOG), _MAX_LOG_BYTES)
        self._lock = threading.Lock()

    def write(self, text: str, *, is_of_tests: bool = False) -> None:
        with self._lock:
            print(text, end="", flush=True)
            for name in (ALL_LOG, TESTS_LOG) if is_of_tests else (ALL_LOG,):
                self._append(name, text)

    def _append(self, name: str, text: str) -> None:
        left = self._left[name]
        if left <= 0:
            return
        self._left[name] = left - len(text)
        append(self._folder / name, text if left > len(text) else f"{text}\n(the rest is left out: 8 MiB are full)\n")


def begin_files(folder: Path) -> Logs:
    """All six are there from now on, and of this run."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (folder / name).write_text("")
    for name in (TESTS_LOG, PROFILE, ENVIRONMENT):
        (folder / name).write_text(f"# {name}: of the parts that ran, below\n")
    return Logs(folder)


@dataclass(frozen=True, slots=True)
class PartOutcome:
    """How a part ended: ok, failed, skipped, or ended at its limit; `verdict` says which, and why."""

    name: str
    verdict: str
    seconds: float

    @property
    def is_good(self) -> bool:
        return self.verdict == "ok" or self.verdict.startswith("skipped")


def write_summary(folder: Path, title: str, outcomes: Sequence[PartOutcome], waiting: Sequence[str]) -> str:
    """Of the parts that have ended, and of all results so far; returns its text."""
    records = read_records(folder)
    lines = [f"# {title}", "", "| part | verdict | results | not ok | time |", "|---|---|---|---|---|"]
    for outcome in outcomes:
        own = [record for record in records if record["part"] == outcome.name]
        bad = sum(record.get("verdict") not in ("ok", "skipped") for record in own)
        lines.append(f"| {outcome.name} | {outcome.verdict} | {len(own)} | {bad} | {outcome.seconds:.0f} s |")
    lines += [f"| {name} | not run yet | | | |" for name in waiting]
    for part in dict.fromkeys(record["part"] for record in records):
        lines += _part_lines(part, [record for record in records if record["part"] == part])
    text = "\n".join(lines) + "\n"
    (folder / SUMMARY).write_text(text)
    return text


def _part_lines(part: str, records: Sequence[Record]) -> list[str]:
    """Figures as tables, one for each set of names; of records without figures only what is not ok."""
    lines = ["", f"## {part}"]
    plain = [record for record in records if not _figures(record)]
    if plain:
        good = sum(record.get("verdict") == "ok" for record in plain)
        lines += ["", f"{good} of {len(plain)} checks without figures are ok."]
    lines += [f"- {record['case']}: {record.get('verdict')}" for record in plain if record.get("verdict") != "ok"]
    for names in dict.fromkeys(tuple(_figures(record)) for record in records if _figures(record)):
        rows = [record for record in records if tuple(_figures(record)) == names]
        lines += ["", *_table(("case", "verdict", *names), rows)]
    return lines


def _figures(record: Record) -> list[str]:
    return [name for name in record if name not in _OWN_KEYS]


def _table(names: Sequence[str], rows: Iterable[Record]) -> list[str]:
    head = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    return head + [f"| {' | '.join(_cell(row.get(name)) for name in names)} |" for row in rows]


def _cell(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
    return " ".join(text.replace("|", "/").split())[:_MAX_CELL_CHARS]

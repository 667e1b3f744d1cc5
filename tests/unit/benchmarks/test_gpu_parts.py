"""The parts of `make gpu`: whatever becomes of one, the others run, and all that was known is in the six files."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.unit.benchmarks import gpu_rehearsal as rehearsal
from tests.unit.benchmarks.gpu_rehearsal import part_of, part_of_tests

from benchmarks.gpu.output import ALL_LOG, FILES, RESULTS, SUMMARY, TESTS_LOG, begin_files
from benchmarks.gpu.parts import chosen, parts_of
from benchmarks.gpu.session import Budget, Command, Part, Session

pytestmark = pytest.mark.timeout(200)


def run(out: Path, *parts: Part, budget_s: float = 120.0) -> dict[str, str]:
    """The verdict of each part."""
    paths = [str(rehearsal.ROOT / "shared"), str(rehearsal.ROOT)]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    session = Session(out, begin_files(out), environ, "fakes")
    return {part.name: part.verdict for part in session.run(parts, Budget(time.monotonic() + budget_s))}


def records(out: Path, part: str = "") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (out / RESULTS).read_text().splitlines()]
    return [record for record in found if part in ("", record["part"])]


def verdicts(out: Path, part: str = "") -> list[tuple[str, str]]:
    return [(record["case"].rpartition("::")[2], record["verdict"]) for record in records(out, part)]


def test_a_run_leaves_exactly_its_six_files(tmp_path: Path) -> None:
    (tmp_path / RESULTS).write_text("of an earlier run\n")
    run(tmp_path, part_of("one", "good", "plain"))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FILES)
    assert len(FILES) == 6
    assert [record["verdict"] for record in records(tmp_path)] == ["ok", "ok"]


def test_a_part_that_fails_does_not_stop_the_next(tmp_path: Path) -> None:
    broken = Part(
        "broken", (Command("broken", ("-c", "import sys; print('why'); sys.exit(3)"), has_cases=False),), 20.0
    )
    assert run(tmp_path, broken, part_of("next", "good")) == {"broken": "failed with 3", "next": "ok"}
    assert "[broken] why\n" in (tmp_path / ALL_LOG).read_text()


def test_what_a_case_has_found_before_it_fails_is_kept(tmp_path: Path) -> None:
    assert run(tmp_path, part_of("one", "two", "lacking", "good")) == {"one": "failed with 1"}
    assert verdicts(tmp_path) == [
        ("two", "ok"),
        ("two", "ok"),
        ("two", "failed"),
        ("lacking", "skipped"),
        ("good", "ok"),
    ]
    assert "ValueError: the third is wrong" in (tmp_path / ALL_LOG).read_text()


def test_a_case_that_hangs_is_ended_with_a_traceback_and_the_others_run(tmp_path: Path) -> None:
    verdict = run(tmp_path, part_of("one", "good", "hang", "good-2", max_silence_s=8.0))
    assert verdict == {"one": "was silent for 8 s"}
    assert verdicts(tmp_path) == [("good", "ok"), ("hang", "was silent for 8 s"), ("good-2", "ok")]
    log = (tmp_path / ALL_LOG).read_text()
    assert "Fatal Python error: Aborted" in log
    assert re.search(r'gpu_rehearsal.py", line \d+ in _hang', log)


def test_a_case_that_segfaults_costs_only_itself(tmp_path: Path) -> None:
    assert run(tmp_path, part_of("one", "good", "segfault", "good-2")) == {"one": "died of SIGSEGV"}
    assert verdicts(tmp_path) == [("good", "ok"), ("segfault", "died of SIGSEGV"), ("good-2", "ok")]


DIES_AT_ITS_START = """
import os, signal, sys
from pathlib import Path
progress = Path(sys.argv[sys.argv.index("--progress") + 1]) if "--progress" in sys.argv else None
if progress is not None and not progress.exists():
    progress.write_text('["begin", "first"]\\n')
os.kill(os.getpid(), signal.SIGSEGV)
"""


def test_a_process_that_dies_before_its_next_case_blames_no_case_again(tmp_path: Path) -> None:
    part = Part("one", (Command("one", ("-c", DIES_AT_ITS_START)),), 60.0)
    assert run(tmp_path, part) == {"one": "died of SIGSEGV"}
    assert verdicts(tmp_path) == [("first", "died of SIGSEGV")]
    log = (tmp_path / ALL_LOG).read_text()
    assert log.count("[one] python3 -c") == 3, "the first, its culprit alone, and the one behind it"


def test_after_a_lost_context_the_rest_runs_anew_and_the_culprit_alone(tmp_path: Path) -> None:
    assert run(tmp_path, part_of("one", "good", "sticky", "good-2")) == {"one": "lost its CUDA context"}
    sticky = [record for record in records(tmp_path) if record["case"] == "sticky"]
    assert [record["verdict"] for record in sticky] == ["failed", "lost its CUDA context", "failed"]
    assert "CUDA_LAUNCH_BLOCKING=0" in sticky[0]["problem"]
    assert "CUDA_LAUNCH_BLOCKING=1" in sticky[2]["problem"]
    assert verdicts(tmp_path)[-1] == ("good-2", "ok")


def test_tests_behind_a_lost_context_or_a_crash_run_in_a_new_process(tmp_path: Path) -> None:
    case_file, out = tmp_path / "case_fake.py", tmp_path / "out"
    case_file.write_text(rehearsal.TEST_FILE)
    run(out, part_of_tests(case_file))
    by_test: dict[str, list[str]] = {}
    for name, verdict in verdicts(out):
        by_test.setdefault(name, []).append(verdict)
    assert by_test == {
        "test_before": ["ok"],
        "test_that_is_wrong": ["failed"],
        "test_that_loses_the_context": ["failed", "lost its CUDA context", "failed"],
        "test_between": ["ok"],
        "test_that_segfaults": ["died of SIGSEGV"],
        "test_that_is_skipped": ["skipped"],
        "test_after": ["ok"],
    }
    assert "test_that_is_wrong" in (out / TESTS_LOG).read_text()
    assert "assert 1 == 2" in (out / RESULTS).read_text()


def test_a_part_ends_at_its_limit_with_the_processes_that_it_started(tmp_path: Path) -> None:
    child = "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print('pid', p.pid, flush=True); p.wait()"
    pid, max_s = None, 1
    while pid is None:  # a busy machine may not come so far within the limit
        max_s *= 2
        part = Part("slow", (Command("slow", ("-c", child), has_cases=False),), max_s)
        assert run(tmp_path, part) == {"slow": f"ended at its limit of {max_s} s"}
        pid = re.search(r"pid (\d+)", (tmp_path / ALL_LOG).read_text())
    assert _ends(int(pid[1]), within_s=10.0)


def test_what_has_no_time_left_is_skipped_and_named(tmp_path: Path) -> None:
    found = run(tmp_path, part_of("slow", "hang", max_s=50.0), part_of("late", "good"), budget_s=4.0)
    assert found["late"] == "skipped: no time left"
    assert "| late | skipped: no time left |" in (tmp_path / SUMMARY).read_text()


def test_a_run_that_is_told_to_end_ends_what_it_has_started_and_leaves_its_summary(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", rehearsal.MODULE, str(out), "--parts", "hangs-long,late"]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(rehearsal.ROOT / "shared"), str(rehearsal.ROOT)])}
    process = subprocess.Popen(command, env=environ, cwd=rehearsal.ROOT, stdout=subprocess.DEVNULL)
    try:
        log = out / ALL_LOG
        while not log.exists() or "case=good" not in log.read_text():
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        assert process.wait(60) == 1
    finally:
        process.kill()
    assert verdicts(out) == [("good", "ok"), ("hang", "stopped")]
    assert "| hangs-long | stopped |" in (out / SUMMARY).read_text()
    assert "| late | skipped: stopped |" in (out / SUMMARY).read_text()


def test_the_summary_is_there_while_parts_run(tmp_path: Path) -> None:
    copy = f"import shutil; shutil.copy({str(tmp_path / SUMMARY)!r}, {str(tmp_path / 'then')!r})"
    look = Part("look", (Command("look", ("-c", copy), has_cases=False),), 20.0)
    run(tmp_path, part_of("one", "good", "plain", "two"), look, part_of("last", "good"))
    then, at_end = (tmp_path / "then").read_text(), (tmp_path / SUMMARY).read_text()
    assert "| one | failed with 1 | 5 | 1 |" in then
    assert "| look | not run yet |" in then
    assert "| good | ok | 12.5 | 1.25 |" in then
    assert "| two | failed | ValueError: the third is wrong |" in then
    assert "| last | ok | 1 | 0 |" in at_end


def test_a_process_that_writes_without_end_fills_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.output._MAX_LOG_BYTES", 5000)
    flood = Part(
        "flood",
        (
            Command(
                "flood",
                ("-c", "print('x' * 70 + '\\n' * 1, end='') or [print('y' * 70) for _ in range(900)]"),
                has_cases=False,
            ),
        ),
        30.0,
    )
    assert run(tmp_path, flood) == {"flood": "ok"}
    log = (tmp_path / ALL_LOG).read_text()
    assert len(log) < 6000
    assert log.endswith("are full)\n")


def test_one_part_can_be_chosen_by_the_beginning_of_its_name() -> None:
    parts = parts_of(rehearsal.ROOT)
    assert [part.name for part in chosen(parts, "step")] == ["step-1B", "step-8B"]
    assert [part.name for part in chosen(parts, "driver, tests")] == ["driver", "tests"]
    assert chosen(parts, "") == parts
    with pytest.raises(ValueError, match=r"part stepp: there is none .* the parts are env driver smoke step-1B"):
        chosen(parts, "stepp")


def test_every_case_file_is_a_command_of_the_tests() -> None:
    (tests,) = chosen(parts_of(rehearsal.ROOT), "tests")
    files = sorted((rehearsal.ROOT / "tests/kernels/triton_cases").glob("case_*.py"))
    assert [command.arguments[-1] for command in tests.commands] == [
        str(path.relative_to(rehearsal.ROOT)) for path in files
    ]
    assert max(Counter(command.name for command in tests.commands).values()) == 1


def _ends(pid: int, within_s: float) -> bool:
    """A killed process takes a moment to go; one that nobody has waited for stays as a zombie."""
    state = Path(f"/proc/{pid}/stat")
    ends_at_s = time.monotonic() + within_s
    while time.monotonic() < ends_at_s:
        try:
            if state.read_text().split()[2] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    return False

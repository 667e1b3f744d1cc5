"""The parts of `make gpu`: each ends in time, and says how."""

import os
import time
from pathlib import Path

from benchmarks.gpu.__main__ import Part, run_parts


def _run(tmp_path: Path, *parts: Part, budget_s: float = 30.0) -> dict[str, str]:
    return {outcome.name: outcome.verdict for outcome in run_parts(parts, tmp_path, os.environ, budget_s)}


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
    return False


def test_a_part_that_fails_does_not_stop_the_next(tmp_path: Path) -> None:
    verdicts = _run(
        tmp_path,
        Part("bad", ("-c", "import sys; print('why'); sys.exit(3)"), max_s=20.0),
        Part("good", ("-c", "print('fine')"), max_s=20.0),
    )
    assert verdicts == {"bad": "failed with 3", "good": "ok"}
    assert (tmp_path / "bad.log").read_text() == "why\n"


def test_a_part_that_hangs_is_ended_with_the_processes_that_it_started(tmp_path: Path) -> None:
    child = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    log, max_s = tmp_path / "slow.log", 1
    while not log.exists() or not log.read_text():  # a busy machine may not come so far within the limit
        max_s *= 2
        verdicts = _run(tmp_path, Part("slow", ("-c", child), max_s=max_s))
        assert verdicts == {"slow": f"ended at its limit of {max_s} s"}
    assert _ends(int(log.read_text()), within_s=10.0)


def test_what_has_no_time_left_is_skipped_and_named(tmp_path: Path) -> None:
    verdicts = _run(
        tmp_path,
        Part("slow", ("-c", "import time; time.sleep(60)"), max_s=50.0),
        Part("late", ("-c", ""), max_s=50.0),
        budget_s=1.5,
    )
    assert verdicts["late"] == "skipped: no time left"

"""Parts of `make gpu` that go wrong in every way that a GPU's may, on a machine without one.

python -m tests.unit.benchmarks.gpu_rehearsal OUT       all of them once, and the six files that they leave
python -m tests.unit.benchmarks.gpu_rehearsal --cases good,hang --out OUT --progress FILE       what they start
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.__main__ import run
from benchmarks.gpu.case_loop import CaseLoop, CaseSkipped, Selection, add_options
from benchmarks.gpu.output import Record
from benchmarks.gpu.parts import PYTEST, chosen
from benchmarks.gpu.session import Budget, Command, Part

ROOT = Path(__file__).parents[3]
MODULE = "tests.unit.benchmarks.gpu_rehearsal"
STICKY = "CUDA error: an illegal memory access was encountered"

TEST_FILE = f"""
import os, signal
import pytest

lost = []

def device():
    if lost:
        raise RuntimeError({STICKY!r})

def test_before():
    device()

def test_that_is_wrong():
    assert 1 == 2

def test_that_loses_the_context():
    lost.append(True)
    device()

def test_between():
    device()

def test_that_segfaults():
    os.kill(os.getpid(), signal.SIGSEGV)

@pytest.mark.skipif(True, reason="there is nothing to test")
def test_that_is_skipped():
    raise AssertionError

def test_after():
    device()
"""
"""In one process every test behind the one that loses the context would fail."""


def _good() -> Iterator[Record]:
    yield {"median_us": 12.5, "times_floor": 1.25}


def _plain() -> Iterator[Record]:
    return iter(())


def _two_results_then_failure() -> Iterator[Record]:
    yield {"rows": 1, "ms": 3.5}
    yield {"rows": 2, "ms": 3.75}
    raise ValueError("the third is wrong")


def _lacking() -> Iterator[Record]:
    raise CaseSkipped("this machine has no such thing")


def _hang() -> Iterator[Record]:
    time.sleep(600)
    return iter(())


def _segfault() -> Iterator[Record]:
    os.kill(os.getpid(), signal.SIGSEGV)
    return iter(())


def _sticky() -> Iterator[Record]:
    blocking = os.environ.get("CUDA_LAUNCH_BLOCKING", "0")
    raise RuntimeError(f"{STICKY} (CUDA_LAUNCH_BLOCKING={blocking})")


_CASES = {
    "good": _good,
    "plain": _plain,
    "two": _two_results_then_failure,
    "lacking": _lacking,
    "hang": _hang,
    "segfault": _segfault,
    "sticky": _sticky,
}


def part_of(name: str, *cases: str, max_s: float = 60.0, max_silence_s: float = 30.0) -> Part:
    """A case may stand in it twice: `good-2` is `good` again."""
    command = Command(name, ("-m", MODULE, "--part", name, "--cases", ",".join(cases)), max_silence_s=max_silence_s)
    return Part(name, (command,), max_s)


def part_of_tests(*files: Path) -> Part:
    commands = tuple(Command(path.stem, (*PYTEST, str(path))) for path in files)
    return Part("tests", commands, max_s=90.0, num_at_a_time=2, are_tests=True)


def rehearse(out: Path, wanted: str, budget_s: float = 90.0) -> int:
    """Every way to go wrong in one run, or the `wanted` ones."""
    out.parent.mkdir(parents=True, exist_ok=True)
    case_file = out.parent / "case_rehearsal.py"
    case_file.write_text(TEST_FILE)
    parts = (
        Part("env", (Command("env", ("-m", "benchmarks.gpu.environment")),), 20.0),
        part_of("fine", "good", "plain", "two", "lacking"),
        part_of("hangs", "good", "hang", "good-2", max_silence_s=8.0),
        part_of("segfaults", "good", "segfault", "good-2"),
        part_of("sticky", "good", "sticky", "good-2"),
        part_of_tests(case_file),
        part_of("slow", "good", "hang", "good-2", max_s=10.0),
        part_of("hangs-long", "good", "hang", max_silence_s=600.0, max_s=600.0),
        part_of("late", "good"),
    )
    return run(chosen(parts, wanted), ROOT, out, Budget(time.monotonic() + budget_s), "A rehearsal without a GPU")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--parts", default="")
    parser.add_argument("--part", default="fake")
    parser.add_argument("--cases", default="")
    add_options(parser.add_argument)
    arguments = parser.parse_args()
    if not arguments.cases:
        return rehearse(arguments.folder, arguments.parts)
    loop = CaseLoop(arguments.part, arguments.out, Selection(arguments.progress, arguments.only))
    for name in arguments.cases.split(","):
        loop.run(name, _CASES[name.partition("-")[0]])
    return loop.exit_code


if __name__ == "__main__":
    sys.exit(main())

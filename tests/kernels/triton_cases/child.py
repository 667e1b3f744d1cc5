"""Runs the case files in processes of their own, and reads what came of them."""

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
CASES = tuple(sorted(HERE.glob("case_*.py")))
TIMEOUT_S = 1500


@dataclass(frozen=True)
class CaseResult:
    """What one file's tests came to; `output` is what pytest printed of its process."""

    num_passed: int
    failures: tuple[str, ...]
    output: str


# The interpreter's products are numpy's. Some kernels of its OpenBLAS, those for AVX2 among them, round a row otherwise
# by where in the matrix it stands, which no GPU does; these do not.
_SAME_SUMS = {"OPENBLAS_CORETYPE": "Nehalem"}


def run_cases(
    folder: Path, environment: dict[str, str], num_processes: int = len(CASES), marked: str = ""
) -> dict[Path, CaseResult]:
    """Of the tests that are `marked` so, as pytest's -m takes it; all: "". As many processes at a time as there are
    cores. A file of its own for each: what loses one GPU's context loses no other file. Fewer: torch and Triton are
    imported less often."""
    groups = [CASES[first::num_processes] for first in range(num_processes)]
    with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
        found = threads.map(
            lambda group: _run_group(group, folder / f"{group[0].stem}.xml", environment, marked), groups
        )
        return {case: result for results in found for case, result in results.items()}


def _run_group(cases: Sequence[Path], report: Path, environment: dict[str, str], marked: str) -> dict[Path, CaseResult]:
    search_path = [str(ROOT), str(ROOT / "shared"), os.environ.get("PYTHONPATH", "")]
    settings = ["-c", str(HERE.parent / "gpu.ini"), "--rootdir", str(ROOT)]
    own = {"PYTHONPATH": os.pathsep.join(search_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", marked, *settings, f"--junitxml={report}", *map(str, cases)],
        env=os.environ | own | _SAME_SUMS | environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    output = done.stdout[-8000:]
    if not report.exists():
        return dict.fromkeys(cases, CaseResult(0, (f"pytest ended with {done.returncode}",), output))
    tests = list(ElementTree.parse(report).getroot().iter("testcase"))
    return {case: _result_of(case, tests, output) for case in cases}


def _result_of(case: Path, tests: Sequence[ElementTree.Element], output: str) -> CaseResult:
    own = [test for test in tests if test.attrib["classname"].rpartition(".")[2] == case.stem]
    failed = [test for test in own if test.find("failure") is not None or test.find("error") is not None]
    names = tuple(test.attrib["name"] for test in failed)
    return CaseResult(sum(len(test) == 0 for test in own), names, output)

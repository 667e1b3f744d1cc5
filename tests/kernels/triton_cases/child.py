"""Runs the case files, each in a pytest of its own, and reads what came of them."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
CASES = tuple(sorted(HERE.glob("case_*.py")))
TIMEOUT_S = 840


@dataclass(frozen=True)
class CaseResult:
    """What one file's tests came to; `output` is what its pytest printed."""

    num_passed: int
    failures: tuple[str, ...]
    output: str


# The interpreter's products are numpy's. Some kernels of its OpenBLAS, those for AVX2 among them, round a row otherwise
# by where in the matrix it stands, which no GPU does; these do not.
_SAME_SUMS = {"OPENBLAS_CORETYPE": "Nehalem"}


def run_cases(folder: Path, environment: dict[str, str]) -> dict[Path, CaseResult]:
    """As many files at a time as there are cores."""
    with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
        results = threads.map(lambda case: _run_case(case, folder / f"{case.stem}.xml", environment), CASES)
        return dict(zip(CASES, results, strict=True))


def _run_case(case: Path, report: Path, environment: dict[str, str]) -> CaseResult:
    search_path = [str(ROOT), str(ROOT / "shared"), os.environ.get("PYTHONPATH", "")]
    settings = ["-c", str(HERE.parent / "gpu.ini"), "--rootdir", str(ROOT)]
    own = {"PYTHONPATH": os.pathsep.join(search_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *settings, f"--junitxml={report}", str(case)],
        env=os.environ | own | _SAME_SUMS | environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    if not report.exists():
        return CaseResult(0, (f"pytest ended with {done.returncode}",), done.stdout[-8000:])
    tests = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = [test for test in tests if test.find("failure") is not None or test.find("error") is not None]
    names = tuple(test.attrib["name"] for test in failed)
    return CaseResult(sum(len(test) == 0 for test in tests), names, done.stdout[-8000:])

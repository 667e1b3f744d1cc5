"""Runs the case files in a pytest of their own and reads what came of them."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
CASES = tuple(sorted(HERE.glob("case_*.py")))
TIMEOUT_S = 840


@dataclass(frozen=True)
class CaseResults:
    """`report` is a JUnit file's root; `output` what the child printed."""

    report: ElementTree.Element
    output: str

    def num_passed(self, case: Path) -> int:
        return sum(len(test) == 0 for test in self._tests(case))

    def failures(self, case: Path) -> list[str]:
        return [
            test.attrib["name"]
            for test in self._tests(case)
            if test.find("failure") is not None or test.find("error") is not None
        ]

    def _tests(self, case: Path) -> list[ElementTree.Element]:
        module = ".".join(case.relative_to(ROOT).with_suffix("").parts)
        # a file that cannot be collected reports its module as its name
        return [
            test
            for test in self.report.iter("testcase")
            if test.attrib.get("classname") == module or test.attrib["name"] == module
        ]


def run_cases(folder: Path, environment: dict[str, str]) -> CaseResults:
    report = folder / "report.xml"
    search_path = [str(ROOT), str(ROOT / "shared"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *CASES],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(search_path)} | environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    if not report.exists():
        raise RuntimeError(f"the cases did not run (exit code {done.returncode}):\n{done.stdout[-8000:]}")
    return CaseResults(ElementTree.parse(report).getroot(), done.stdout[-8000:])

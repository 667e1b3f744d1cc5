"""The Triton cases, in Triton's interpreter: on the CPU, in four processes of their own.

Triton decides when it is imported whether kernels are interpreted, and other tests of this process may import it.
"""

from pathlib import Path

import numpy as np
import pytest
from packaging.version import Version
from tests.kernels.triton_cases.child import CASES, CaseResult, run_cases

triton = pytest.importorskip("triton", reason="Triton is installed on Linux only")
pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        triton.__version__.startswith("3.6.") and Version(np.__version__) >= Version("2.4"),
        reason="the interpreter of Triton 3.6 needs numpy before 2.4",
    ),
]


def interpreted(folder: Path, marked: str) -> dict[Path, CaseResult]:
    return run_cases(folder, {"TRITON_INTERPRET": "1"}, num_processes=4, marked=marked)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, CaseResult]:
    return interpreted(tmp_path_factory.mktemp("interpreter"), "not long")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_in_the_interpreter(case: Path, results: dict[Path, CaseResult]) -> None:
    result = results[case]
    assert result.failures == (), result.output
    assert result.num_passed > 0, result.output


@pytest.mark.long
def test_the_long_ones_in_the_interpreter(tmp_path: Path) -> None:
    results = interpreted(tmp_path, "long").values()
    assert [failure for result in results for failure in result.failures] == []
    assert sum(result.num_passed for result in results) > 0

"""The Triton cases, in Triton's interpreter: on the CPU, in a process of their own.

Triton decides when it is imported whether kernels are interpreted, and other tests of this process may import it.
"""

from pathlib import Path

import pytest
from tests.kernels.triton_cases.child import CASES, CaseResults, run_cases

pytest.importorskip("triton", reason="Triton is installed on Linux only")
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> CaseResults:
    return run_cases(tmp_path_factory.mktemp("interpreter"), {"TRITON_INTERPRET": "1"})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_in_the_interpreter(case: Path, results: CaseResults) -> None:
    assert results.num_passed(case) > 0, results.output
    assert results.failures(case) == [], results.output

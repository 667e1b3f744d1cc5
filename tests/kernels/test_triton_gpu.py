"""The Triton cases again, compiled and run on this machine's GPU: `pytest -m gpu`."""

from pathlib import Path

import pytest
from tests.kernels.triton_cases.child import CASES, CaseResults, run_cases

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> CaseResults:
    return run_cases(tmp_path_factory.mktemp("gpu"), {"TRITON_INTERPRET": "0"})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_on_the_gpu(case: Path, results: CaseResults) -> None:
    assert results.num_passed(case) > 0, results.output
    assert results.failures(case) == [], results.output

"""The Triton cases again, compiled and run on this machine's GPU: `pytest -m gpu`."""

from pathlib import Path

import pytest
from tests.kernels.triton_cases.child import CASES, CaseResult, run_cases

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, CaseResult]:
    return run_cases(tmp_path_factory.mktemp("gpu"), {"TRITON_INTERPRET": "0"})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_on_the_gpu(case: Path, results: dict[Path, CaseResult]) -> None:
    result = results[case]
    assert result.failures == (), result.output
    assert result.num_passed > 0, result.output

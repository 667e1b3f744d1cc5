import pytest
import torch
from tests.kernels.triton_cases.support import TOLERANCES, normal, poisoned

from weir.ops import reference
from weir.ops.gpu.gated import gated


@pytest.mark.parametrize(("dtype", "atol", "rtol"), TOLERANCES)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (3, 63), (2, 1536), (5, 2500)])
def test_it_equals_the_reference(num_rows: int, width: int, dtype: torch.dtype, atol: float, rtol: float) -> None:
    torch.manual_seed(42)
    gate_up, out = normal(num_rows, 2 * width, dtype=dtype), poisoned(num_rows, width, dtype=dtype)
    for activation in ("silu", "gelu_tanh"):
        gated(gate_up, out, activation)
        torch.testing.assert_close(out, reference.gated(gate_up, activation), atol=atol, rtol=rtol)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_large_gates_neither_overflow_nor_vanish() -> None:
    gate_up, out = normal(1, 4), poisoned(1, 2)
    gate_up[0] = torch.tensor([-1000.0, 1000.0, 3.0, 3.0])
    gated(gate_up, out)
    assert out.tolist() == [[0.0, 3000.0]]


def test_misfits_are_named() -> None:
    with pytest.raises(ValueError, match=r"gate_up has shape \[2, 64\], expected \[2, 62\]"):
        gated(normal(2, 64), poisoned(2, 31))

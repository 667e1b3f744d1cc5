import pytest
import torch
from tests.kernels.triton_cases.support import TOLERANCES, Heads, ints, normal, poisoned

from weir.ops import reference
from weir.ops.gpu.rotary_kv_write import rotary_kv_write

SHAPES = [
    pytest.param(Heads(9, 3, 64), id="9on3x64"),
    pytest.param(Heads(32, 8, 128), id="32on8x128"),
    pytest.param(Heads(4, 4, 80), id="4on4x80"),
]


def tables(head_dim: int, num_positions: int = 600) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = 10000.0 ** -(torch.arange(head_dim // 2) / (head_dim // 2))
    angles = torch.outer(torch.arange(num_positions).float(), frequencies).to(ints([0]).device)
    return angles.cos(), angles.sin()


def random_norms(head_dim: int, dtype: torch.dtype) -> reference.HeadNorms:
    return reference.HeadNorms(normal(head_dim, dtype=dtype), normal(head_dim, dtype=dtype), 0.1)


@pytest.mark.parametrize(("dtype", "atol", "rtol"), TOLERANCES)
@pytest.mark.parametrize("heads", SHAPES)
@pytest.mark.parametrize(
    ("mapping_dtype", "has_norms"), [(torch.int32, False), (torch.int64, False), (torch.int64, True)], ids=str
)
def test_it_equals_the_reference_and_touches_nothing_else(
    heads: Heads, dtype: torch.dtype, atol: float, rtol: float, mapping_dtype: torch.dtype, has_norms: bool
) -> None:
    torch.manual_seed(42)
    cos, sin = tables(heads.head_dim)
    positions, slot_mapping = ints([0, 15, 16, 500, 63]), ints([16, 31, 70, 5, -1], mapping_dtype)
    rows = normal(5, heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim, dtype=dtype)
    pages = poisoned(6, 2, 2, heads.num_kv_heads, 16, heads.head_dim, dtype=dtype)
    expected_rows, expected_pages = rows.clone(), pages.clone()
    before = rows.clone()
    norms = random_norms(heads.head_dim, dtype) if has_norms else None
    rotary_kv_write(rows, cos, sin, positions, slot_mapping, pages[:, 1, 0], pages[:, 1, 1], None, norms)
    reference.rotary_kv_write(
        expected_rows, cos, sin, positions, slot_mapping, expected_pages[:, 1, 0], expected_pages[:, 1, 1], norms
    )
    torch.testing.assert_close(rows, expected_rows, atol=atol, rtol=rtol)
    torch.testing.assert_close(pages, expected_pages, atol=atol, rtol=rtol, equal_nan=True)
    assert torch.equal(rows[:, heads.num_heads :], before[:, heads.num_heads :])


def test_a_page_far_away_needs_64_bits() -> None:
    """With this stride page 3 begins behind element 2^31."""
    cos, sin = tables(64)
    stride = 2**30
    slot_mapping = ints([3 * 16 + 2], torch.int64)
    memory = torch.empty(3 * stride + 4096, dtype=torch.float16, device=cos.device)
    pages = memory.as_strided((4, 1, 16, 64), (stride, 1024, 64, 1))
    pages[3] = 0
    row = normal(1, 3, 64, dtype=torch.float16)
    rotary_kv_write(row, cos, sin, ints([0]), slot_mapping, pages, pages.as_strided(pages.shape, pages.stride(), 2048))
    assert torch.equal(pages[3, 0, 2], row[0, 1])


def test_misfits_are_named() -> None:
    cos, sin = tables(64)
    pages = poisoned(2, 2, 3, 16, 64)

    def launch(rows: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        rotary_kv_write(rows, cos, sin, ints([0, 1]), slot_mapping, pages[:, 0], pages[:, 1])

    with pytest.raises(ValueError, match="6 heads of 64, expected more than 2 x 3"):
        launch(normal(2, 6, 64), ints([0, 1], torch.int64))
    with pytest.raises(ValueError, match=r"slot_mapping is torch.float32, expected torch.int32 or torch.int64"):
        launch(normal(2, 9, 64), normal(2))
    norms = reference.HeadNorms(normal(64), normal(32), 1e-5)
    with pytest.raises(ValueError, match=r"norms\.keys has shape \[32\], expected \[64\]"):
        rotary_kv_write(normal(2, 9, 64), cos, sin, ints([0, 1]), ints([0, 1]), pages[:, 0], pages[:, 1], None, norms)
    with pytest.raises(ValueError, match=r"slot_mapping has shape \[3\], expected \[2\]"):
        launch(normal(2, 9, 64), ints([0, 1, 2], torch.int64))

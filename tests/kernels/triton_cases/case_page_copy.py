import pytest
import torch
from tests.kernels.triton_cases.support import DEVICE, ints

from weir.ops.page_copy import reference
from weir.ops.page_copy.launch import gather_pages, scatter_pages


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8).to(DEVICE)


@pytest.mark.parametrize("page_bytes", [8, 64, 24 * 1001, 16384])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_pages_come_and_go_whole(page_bytes: int, id_dtype: torch.dtype) -> None:
    torch.manual_seed(page_bytes)
    pages = random_bytes(9, page_bytes)
    page_ids = ints([7, 0, 3, 8], id_dtype)
    buffer, expected = random_bytes(4, page_bytes), random_bytes(4, page_bytes)
    gather_pages(pages, page_ids, buffer)
    reference.gather_pages(pages, page_ids, expected)
    assert torch.equal(buffer, expected)

    arena = random_bytes(9, page_bytes)
    expected_arena = arena.clone()
    scatter_pages(buffer, page_ids, arena)
    reference.scatter_pages(expected, page_ids, expected_arena)
    assert torch.equal(arena, expected_arena)


def test_pages_may_be_part_of_a_wider_row() -> None:
    torch.manual_seed(1)
    pages, buffer = random_bytes(5, 200), random_bytes(2, 64)
    gather_pages(pages[:, 8:72], ints([4, 1]), buffer)
    assert torch.equal(buffer, pages[[4, 1], 8:72])


def test_misfits_are_named() -> None:
    pages, ids = random_bytes(5, 64), ints([0, 1])
    with pytest.raises(ValueError, match=r"the copy's target has shape \[2, 32\], expected \[any, 64\]"):
        gather_pages(pages, ids, random_bytes(2, 32))
    with pytest.raises(ValueError, match=r"page_ids has shape \[2\], expected \[3\]"):
        gather_pages(pages, ids, random_bytes(3, 64))
    with pytest.raises(ValueError, match="multiples of 8 bytes"):
        scatter_pages(random_bytes(2, 60), ids, random_bytes(5, 60))

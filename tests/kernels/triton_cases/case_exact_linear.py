"""A row of a linear layer is the same to the bit, however many rows are computed with it and wherever it stands."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.kernels.triton_cases.support import DEVICE, DOT_TOLERANCES, IS_INTERPRETED, normal, poisoned
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from weir.ops import reference
from weir.ops.gpu.exact_linear import exact_linear, exact_linear_kernel, exact_tiles

BATCH_SIZES = (1, 2, 7, 16, 33, 64)
DTYPES = [parameter.values[0] for parameter in DOT_TOLERANCES]
IDS = [parameter.id for parameter in DOT_TOLERANCES]
# ten seconds in fp32 where it is interpreted
WIDE_DTYPES = [
    pytest.param(dtype, id=name, marks=pytest.mark.long if dtype is torch.float32 else ())
    for dtype, name in zip(DTYPES, IDS, strict=True)
]
# outputs, inputs: one of each; neither a multiple of a tile; one that is; several blocks of inputs; wider tiles
SHAPES = [(1, 1), (33, 63), (96, 64), (48, 576), (8192, 64)]


def computed(
    rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    out = poisoned(len(rows), len(matrix), dtype=dtype or rows.dtype)
    exact_linear(rows, matrix, bias, out)
    return out


def placed(row: torch.Tensor, others: torch.Tensor, place: int) -> torch.Tensor:
    """`row` among as many others as there are."""
    return torch.cat([others[:place], row[None], others[place:]]).contiguous()


@pytest.mark.parametrize(("dtype", "atol", "rtol"), DOT_TOLERANCES)
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
def test_it_equals_the_reference(
    num_outputs: int, num_inputs: int, with_bias: bool, dtype: torch.dtype, atol: float, rtol: float
) -> None:
    torch.manual_seed(50)
    rows, matrix = normal(5, num_inputs, dtype=dtype), normal(num_outputs, num_inputs, dtype=dtype)
    bias = normal(num_outputs, dtype=dtype) if with_bias else None
    expected = reference.linear(rows, matrix, bias)
    # sums of so many products of numbers of about 1 are about so large
    scale = num_inputs**0.5
    torch.testing.assert_close(computed(rows, matrix, bias).float(), expected, atol=atol * scale, rtol=rtol)


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(33, 63), (48, 576)])
def test_a_row_is_the_same_to_the_bit_in_every_batch_and_at_every_place(
    num_outputs: int, num_inputs: int, with_bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(51)
    row, matrix = normal(num_inputs, dtype=dtype), normal(num_outputs, num_inputs, dtype=dtype)
    bias = normal(num_outputs, dtype=dtype) if with_bias else None
    alone = computed(row[None], matrix, bias)[0]
    for batch_size in BATCH_SIZES:
        others = 100 * normal(batch_size - 1, num_inputs, dtype=dtype)
        for place in {0, batch_size // 3, batch_size - 1}:
            together = computed(placed(row, others, place), matrix, bias)
            assert torch.equal(together[place], alone), f"place {place} of {batch_size}"


@pytest.mark.parametrize("dtype", WIDE_DTYPES)
def test_so_it_is_where_the_matrix_has_many_outputs_and_wider_tiles(dtype: torch.dtype) -> None:
    torch.manual_seed(56)
    matrix, rows = normal(8192, 64, dtype=dtype), normal(33, 64, dtype=dtype)
    together = computed(rows, matrix, None)
    for place in (0, 7, 32):
        assert torch.equal(computed(rows[place : place + 1].clone(), matrix, None)[0], together[place])


def test_a_row_is_the_same_at_every_place_of_a_tile_and_beyond_it() -> None:
    torch.manual_seed(52)
    row, matrix = normal(576), normal(33, 576)
    num_rows = 3 * exact_tiles(33, 576, torch.float32).block_rows + 1
    together = computed(row.repeat(num_rows, 1), matrix, None)
    assert torch.equal(together, computed(row[None], matrix, None).repeat(num_rows, 1))


def test_rows_of_no_numbers_and_infinite_ones_leave_the_others_alone() -> None:
    torch.manual_seed(53)
    rows, matrix = normal(3, 63), normal(5, 63)
    expected = computed(rows, matrix, None)
    rows[0], rows[2] = float("nan"), float("inf")
    found = computed(rows, matrix, None)
    assert torch.equal(found[1], expected[1])
    assert bool(found[0].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_logits_are_not_rounded_to_the_type_of_the_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(54)
    rows, matrix = normal(7, 576, dtype=dtype), normal(100, 576, dtype=dtype)
    found = computed(rows, matrix, None, torch.float32)
    torch.testing.assert_close(found, reference.linear(rows, matrix), atol=1e-4, rtol=1e-4)
    assert torch.equal(found[:1], computed(rows[:1], matrix, None, torch.float32))


def test_it_reads_and_writes_the_first_columns_of_wider_buffers() -> None:
    torch.manual_seed(55)
    wide_rows, wide_matrix, wide_out = normal(3, 96), normal(40, 96), poisoned(3, 64)
    exact_linear(wide_rows[:, :63], wide_matrix[:, :63], None, wide_out[:, :40])
    expected = computed(wide_rows[:, :63].contiguous(), wide_matrix[:, :63].contiguous(), None)
    torch.testing.assert_close(wide_out[:, :40], expected, atol=2e-5, rtol=2e-5)
    assert bool(wide_out[:, 40:].isnan().all())


def test_no_rows_are_no_launch() -> None:
    exact_linear(normal(0, 64), normal(8, 64), None, poisoned(0, 8))


def test_tiles_do_not_depend_on_the_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the compiler sees of a launch is the same for one row and for many."""
    kernel_type: Any = InterpretedFunction if IS_INTERPRETED else JITFunction
    seen: list[tuple[tuple[object, ...], dict[str, object]]] = []
    launch: Callable[..., object] = kernel_type.run

    def noted(kernel: Any, *args: object, **kwargs: object) -> object:
        sizes = tuple(argument for argument in args if isinstance(argument, int))
        seen.append((sizes[1:], {name: value for name, value in kwargs.items() if name != "grid"}))
        return launch(kernel, *args, **kwargs)

    monkeypatch.setattr(kernel_type, "run", noted)
    matrix, buffer = normal(96, 64), normal(65, 64)
    for num_rows in (1, 2, 16, 65):
        computed(buffer[:num_rows], matrix, None)
    assert len(seen) == 4
    assert all(first == second for first, second in pairwise(seen))


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter compiles nothing")
def test_one_variant_serves_every_number_of_rows() -> None:
    matrix, buffer = normal(96, 64, dtype=torch.bfloat16), normal(65, 64, dtype=torch.bfloat16)
    computed(buffer, matrix, None)
    num_variants = len(exact_linear_kernel.device_caches[torch.cuda.current_device()][0])
    for num_rows in (1, 2, 16, 64):
        computed(buffer[:num_rows], matrix, None)
    assert len(exact_linear_kernel.device_caches[torch.cuda.current_device()][0]) == num_variants


def test_misfits_are_named() -> None:
    rows, matrix, out = normal(2, 64), normal(8, 64), poisoned(2, 8)
    with pytest.raises(ValueError, match=r"matrix has shape \[8, 63\], expected \[any, 64\]"):
        exact_linear(rows, matrix[:, :63], None, out)
    with pytest.raises(ValueError, match=r"out has shape \[2, 8\], expected \[3, 8\]"):
        exact_linear(normal(3, 64), matrix, None, out)
    with pytest.raises(ValueError, match=r"bias has shape \[9\], expected \[8\]"):
        exact_linear(rows, matrix, normal(9), out)
    with pytest.raises(ValueError, match=r"out is torch.float16, expected torch.float32"):
        exact_linear(rows, matrix, None, out.half())
    with pytest.raises(ValueError, match=r"rows has stride 3|last dimension of rows has stride 2"):
        exact_linear(normal(2, 128)[:, ::2], matrix, None, out)
    with pytest.raises(ValueError, match=r"rows begins at 0x[0-9a-f]+, expected a multiple of 16 bytes"):
        exact_linear(normal(2, 65)[:, 1:], matrix, None, out)
    assert out.device.type == DEVICE.type

"""The matrix products of a layer, and the rows that go into them: numbers, or E4M3 with a scale a row."""

from dataclasses import dataclass

import torch

from weir.model.torch.weights import WeightFormat
from weir.ops.gpu.exact_linear import exact_linear
from weir.ops.gpu.fp8_product import choose_product
from weir.ops.gpu.fp8_rows import gated_quantize, quantize_rows
from weir.ops.gpu.gated import gated
from weir.ops.gpu.rms_norm import rms_norm
from weir.ops.reference import Activation


@dataclass(frozen=True, slots=True)
class ProductRows:
    """What a matrix multiplies: [rows, in]. `scales` fp32 [rows] where `values` are E4M3."""

    values: torch.Tensor
    scales: torch.Tensor | None = None

    def __getitem__(self, rows: slice) -> "ProductRows":
        return ProductRows(self.values[rows], None if self.scales is None else self.scales[rows])


class LayerProducts:
    """Makes rows for products, and multiplies them, in one format of weights on one device."""

    def __init__(
        self, kept: WeightFormat, device: torch.device, activation: Activation = "silu", *, is_exact: bool = False
    ) -> None:
        """`is_exact`: rows of products do not depend on the batch. Raises ValueError for that with E4M3 matrices."""
        if is_exact and kept.is_fp8:
            raise ValueError("rows of products of E4M3 matrices depend on the batch")
        self.linear = exact_linear if is_exact else library_linear
        """Of numbers: `rows` [rows, in], `matrix` [out, in], bias [out] or None, `out` of their type or fp32."""
        self._kept = kept
        self._activation = activation
        self._device = device
        self._fp8_product = choose_product(device) if kept.is_fp8 else None

    def rows(self, max_rows: int, width: int) -> ProductRows:
        """Room for them."""
        values = torch.zeros(max_rows, width, device=self._device, dtype=self._kept.matrix_dtype)
        scales = torch.zeros(max_rows, device=self._device) if self._kept.is_fp8 else None
        return ProductRows(values, scales)

    def norm(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        epsilon: float,
        out: ProductRows,
        residual: torch.Tensor | None = None,
    ) -> None:
        rms_norm(rows, weight, epsilon, out.values, residual, out.scales)

    def gate(self, gate_up: torch.Tensor, out: ProductRows) -> None:
        if out.scales is None:
            gated(gate_up, out.values, self._activation)
        else:
            gated_quantize(gate_up, out.values, out.scales, self._activation)

    def made_of(self, rows: torch.Tensor, room: ProductRows) -> ProductRows:
        """`rows` as they are, or quantized into `room`."""
        if room.scales is None:
            return ProductRows(rows)
        quantize_rows(rows, room.values, room.scales)
        return room

    def multiply(
        self,
        rows: ProductRows,
        matrix: torch.Tensor,
        scales: torch.Tensor | None,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """`rows` [rows, in] times `matrix` [out, in], whose rows have `scales` where they are E4M3."""
        if self._fp8_product is not None and rows.scales is not None and scales is not None:
            self._fp8_product(rows.values, rows.scales, matrix, scales, bias, out)
        else:
            self.linear(rows.values, matrix, bias, out)


def library_linear(rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """As `exact_linear`, but for its promise; what goes to a wider `out` is rounded to the rows' type before."""
    if bias is not None:
        torch.addmm(bias, rows, matrix.t(), out=out)
    elif out.dtype == rows.dtype:
        torch.mm(rows, matrix.t(), out=out)
    else:
        out.copy_(torch.mm(rows, matrix.t()))

"""SiLU(gate) * up, or GELU(gate) * up, and quantization in one pass, on CPUs."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from weir.ops.cpu.quantize import emit_load_group, emit_quantize
from weir.ops.cpu.quantized_rows import GROUP, RECORD_BYTES
from weir.ops.simd.float import emit_constant, emit_exp, emit_fma
from weir.ops.simd.jit import kernel, simd

_GELU_LINEAR = 2 * math.sqrt(2 / math.pi)
_GELU_CUBIC = _GELU_LINEAR * 0.044715


@simd
def _silu_mul_quantize_group(typing_context: Any, gate: Any, up: Any, record: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        _emit_group(builder, values, lambda gate: gate)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@simd
def _gelu_mul_quantize_group(typing_context: Any, gate: Any, up: Any, record: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        _emit_group(builder, values, lambda gate: _emit_gelu_argument(builder, gate))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def _emit_group(builder: ir.IRBuilder, values: Sequence[ir.Value], argument: Callable[[ir.Value], ir.Value]) -> None:
    """gate / (1 + exp(-argument(gate))) * up of 32, quantized."""
    gates, ups = emit_load_group(builder, values[0]), emit_load_group(builder, values[1])
    products = []
    for gate, up in zip(gates, ups, strict=True):
        exponential = emit_exp(builder, builder.fneg(argument(gate)))
        activated = builder.fdiv(gate, builder.fadd(emit_constant(gate.type, 1.0), exponential))
        products.append(builder.fmul(activated, up))
    emit_quantize(builder, products, values[2])


def _emit_gelu_argument(builder: ir.IRBuilder, gate: ir.Value) -> ir.Value:
    """GELU by tanh (Hendrycks, Gimpel: "Gaussian error linear units", 2016), 0.5 x (1 + tanh(u)), is x / (1 + e**-2u)
    with u = sqrt(2 / pi) (x + 0.044715 x**3)."""
    square = builder.fmul(gate, gate)
    linear, cubic = (emit_constant(gate.type, number) for number in (_GELU_LINEAR, _GELU_CUBIC))
    return builder.fmul(gate, emit_fma(builder, square, cubic, linear))


@kernel
def gated_quantize_range(
    gate_up: NDArray[np.float32], rows: NDArray[np.uint8], is_gelu: Any, first_group: int, last_group: int
) -> None:
    """Quantizes groups [first_group, last_group) of 32 products silu(gate) * up, counted through all rows; gelu(gate),
    by tanh, if `is_gelu`.

    `gate_up` float32 [m, 2 * inner], a row's gates before its ups; `rows` uint8 [m, row_bytes(inner)]; both contiguous;
    nothing is checked here.
    """
    inner_bytes = gate_up.shape[1] * 2
    num_groups = inner_bytes // (GROUP * 4)
    # a division a group would take as long as the group
    row, index = first_group // num_groups, first_group % num_groups
    for _ in range(first_group, last_group):
        gate = gate_up.ctypes.data + row * (2 * inner_bytes) + index * (GROUP * 4)
        record = rows.ctypes.data + row * rows.shape[1] + index * RECORD_BYTES
        if is_gelu:
            _gelu_mul_quantize_group(gate, gate + inner_bytes, record)
        else:
            _silu_mul_quantize_group(gate, gate + inner_bytes, record)
        index += 1
        if index == num_groups:
            row, index = row + 1, 0

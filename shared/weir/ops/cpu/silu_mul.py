"""SiLU(gate) * up and quantization in one pass, on CPUs."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from weir.ops.cpu.quantize import emit_load_group, emit_quantize
from weir.ops.cpu.quantized_rows import GROUP, RECORD_BYTES
from weir.ops.simd.float import emit_constant, emit_exp
from weir.ops.simd.jit import kernel, simd


@simd
def _silu_mul_quantize_group(typing_context: Any, gate: Any, up: Any, record: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        gates, ups = emit_load_group(builder, values[0]), emit_load_group(builder, values[1])
        products = [builder.fmul(_emit_silu(builder, gate), up) for gate, up in zip(gates, ups, strict=True)]
        emit_quantize(builder, products, values[2])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def _emit_silu(builder: ir.IRBuilder, gate: ir.Value) -> ir.Value:
    """gate / (1 + exp(-gate))."""
    exponential = emit_exp(builder, builder.fneg(gate))
    return builder.fdiv(gate, builder.fadd(emit_constant(gate.type, 1.0), exponential))


@kernel
def silu_mul_quantize_range(
    gate_up: NDArray[np.float32], rows: NDArray[np.uint8], first_group: int, last_group: int
) -> None:
    """Quantizes groups [first_group, last_group) of 32 products silu(gate) * up, counted through all rows.

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
        _silu_mul_quantize_group(gate, gate + inner_bytes, record)
        index += 1
        if index == num_groups:
            row, index = row + 1, 0

"""Quantizes rows on CPUs."""

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from weir.ops.quantize.group import emit_load_group, emit_quantize
from weir.ops.quantize.rows import GROUP, RECORD_BYTES, empty_rows
from weir.ops.simd.jit import kernel, simd


@simd
def _quantize_group(typing_context: Any, inputs: Any, record: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        emit_quantize(builder, emit_load_group(builder, values[0]), values[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@kernel
def quantize_range(inputs: NDArray[np.float32], rows: NDArray[np.uint8], first_group: int, last_group: int) -> None:
    """Quantizes groups [first_group, last_group) of 32, counted through all rows.

    `inputs` float32 [m, k], `rows` uint8 [m, row_bytes(k)], both contiguous; nothing is checked here.
    """
    for group in range(first_group, last_group):
        _quantize_group(inputs.ctypes.data + group * (GROUP * 4), rows.ctypes.data + group * RECORD_BYTES)


def quantize_rows(inputs: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Quantized rows of `inputs` float32 [m, k]; `weir.ops.quantize.rows` describes them.

    Raises:
        ValueError: k is no multiple of 32.
    """
    inputs = np.ascontiguousarray(inputs, dtype=np.float32)
    rows = empty_rows(*inputs.shape)
    quantize_range(inputs, rows, 0, inputs.size // GROUP)
    return rows

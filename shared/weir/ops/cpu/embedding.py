"""Reads rows of a packed matrix back as floats: the embedding, where it is tied to the output matrix."""

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from weir.ops.cpu.linear_pack import BLOCK_OUTPUTS, SCALES_BYTES
from weir.ops.cpu.quantized_rows import GROUP
from weir.ops.simd.features import InstructionSet
from weir.ops.simd.float import INT32, emit_load
from weir.ops.simd.integer import emit_load_half
from weir.ops.simd.jit import kernel, simd

_VECTOR_BYTES = 4 * BLOCK_OUTPUTS


@simd
def _load_half(typing_context: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.extract_element(emit_load_half(builder, values[0], 1, InstructionSet.PORTABLE), INT32(0))

    return types.float32(types.int64), codegen


@simd
def _load_float(typing_context: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return emit_load(builder, values[0], 1)

    return types.float32(types.int64), codegen


@kernel
def embedding_range(
    weights: NDArray[np.uint8],
    bits: int,
    factor: np.float32,
    token_ids: NDArray[np.int64],
    out: NDArray[np.float32],
    first_row: int,
    last_row: int,
) -> None:
    """Rows [first_row, last_row) of `out` float32 [m, inputs] = rows `token_ids` int64 [m] of the matrix * `factor`.

    `weights` is `PackedMatrix.data`, `bits` its kind; nothing is checked here, not even the token ids.
    """
    num_groups = out.shape[1] // GROUP
    group_bytes = SCALES_BYTES + GROUP * BLOCK_OUTPUTS // 8 * bits
    for row in range(first_row, last_row):
        block, lane = token_ids[row] // BLOCK_OUTPUTS, token_ids[row] % BLOCK_OUTPUTS
        for group in range(num_groups):
            start = (block * num_groups + group) * group_bytes
            first = start + SCALES_BYTES + 4 * lane
            column = group * GROUP
            if bits == 4:
                scale = _load_half(weights.ctypes.data + start + 2 * lane)
                minimum = _load_half(weights.ctypes.data + start + 2 * (BLOCK_OUTPUTS + lane))
                for index in range(GROUP):
                    quad, byte = index // 4, index % 4
                    pair = weights[first + quad // 2 * _VECTOR_BYTES + byte]
                    quant = pair >> 4 if quad % 2 else pair & 15
                    out[row, column + index] = (scale * np.float32(quant) + minimum) * factor
            else:
                scale = _load_float(weights.ctypes.data + start + 4 * lane)
                for index in range(GROUP):
                    stored = weights[first + index // 4 * _VECTOR_BYTES + index % 4]
                    out[row, column + index] = scale * np.float32(np.int32(stored) - 128) * factor

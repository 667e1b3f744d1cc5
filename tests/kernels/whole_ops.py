"""Operations over whole arrays, of what the forward pass calls in parts."""

import numpy as np
from numpy.typing import NDArray

from weir.ops.cpu.embedding import embedding_range
from weir.ops.cpu.gated import gated_quantize_range
from weir.ops.cpu.linear_pack import PackedMatrix
from weir.ops.cpu.quantized_rows import GROUP, empty_rows, records_of
from weir.ops.cpu.rms_norm import rms_norm_quantize_range


def embedding_rows(matrix: PackedMatrix, token_ids: NDArray[np.int64], factor: float = 1.0) -> NDArray[np.float32]:
    """Rows `token_ids` [m] of the matrix as float32 [m, inputs], exact but for what `factor` rounds."""
    out = np.empty((len(token_ids), matrix.num_inputs), dtype=np.float32)
    embedding_range(matrix.data, int(matrix.kind), np.float32(factor), token_ids, out, 0, len(token_ids))
    return out


def rms_norm_quantize(inputs: NDArray[np.float32], weight: NDArray[np.float32], epsilon: float) -> NDArray[np.uint8]:
    """Quantized rows of the normalized `inputs` float32 [m, k]; `weight` float32 [k]."""
    inputs, weight = (np.ascontiguousarray(array, dtype=np.float32) for array in (inputs, weight))
    rows = empty_rows(*inputs.shape)
    rms_norm_quantize_range(inputs, weight, epsilon, rows, 0, len(inputs))
    return rows


def silu_mul_quantize(gate_up: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Quantized rows [m, inner] of silu(gate) * up, from `gate_up` float32 [m, 2 * inner]."""
    return _gated(gate_up, is_gelu=False)


def gelu_mul_quantize(gate_up: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The same of gelu(gate) * up."""
    return _gated(gate_up, is_gelu=True)


def _gated(gate_up: NDArray[np.float32], *, is_gelu: bool) -> NDArray[np.uint8]:
    gate_up = np.ascontiguousarray(gate_up, dtype=np.float32)
    num_rows, columns = gate_up.shape
    rows = empty_rows(num_rows, columns // 2)
    gated_quantize_range(gate_up, rows, np.bool_(is_gelu), 0, num_rows * columns // 2 // GROUP)
    return rows


def dequantized(rows: NDArray[np.uint8]) -> NDArray[np.float64]:
    """What quantized rows stand for, [rows, inputs]."""
    records = records_of(rows)
    values: NDArray[np.float64] = records["values"] * records["scale"].astype(np.float64)[..., None]
    return values.reshape(rows.shape[0], -1)


def bf16_to_float32(numbers: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Exact."""
    return (numbers.astype(np.uint32) << np.uint32(16)).view(np.float32)

"""Where the bytes of quantized rows lie.

A row is a record for each group of 32 inputs, so that a kernel needs one address for each row and no second stream:

    byte  0  32 int8, in -127 … 127
         32  float32 scale: input = value * scale
         36  float32 scale * sum of the values        what the minima of 4-bit weights are multiplied with
         40  int32   -128 * sum of the values         what makes up for 8-bit weights being stored with 128 added
         44  4 bytes that nobody reads

Behind its records a row may have padding, less than a record.
"""

import numpy as np
from numpy.typing import NDArray

GROUP = 32
RECORD_BYTES = 48
SCALE_OFFSET, SCALED_SUM_OFFSET, CORRECTION_OFFSET = 32, 36, 40
_CROWDED_STRIDE_BYTES = 1024
"""Rows at a multiple of this distance share few sets of a first cache, which then cannot hold a group of 32 rows."""
_PADDING_BYTES = 32

RECORD = np.dtype(
    {
        "names": ["values", "scale", "scaled_sum", "correction"],
        "formats": [(np.int8, (GROUP,)), np.float32, np.float32, np.int32],
        "offsets": [0, SCALE_OFFSET, SCALED_SUM_OFFSET, CORRECTION_OFFSET],
        "itemsize": RECORD_BYTES,
    }
)


def num_groups_of(num_inputs: int) -> int:
    """Raises ValueError unless `num_inputs` is a positive multiple of 32."""
    if num_inputs <= 0 or num_inputs % GROUP:
        raise ValueError(f"rows of {num_inputs} inputs; quantized rows need a positive multiple of {GROUP}")
    return num_inputs // GROUP


def row_bytes(num_inputs: int) -> int:
    """Of one quantized row of `num_inputs` values, padding included."""
    num_bytes = num_groups_of(num_inputs) * RECORD_BYTES
    return num_bytes if num_bytes % _CROWDED_STRIDE_BYTES else num_bytes + _PADDING_BYTES


def empty_rows(num_rows: int, num_inputs: int) -> NDArray[np.uint8]:
    """Memory for quantized rows, uint8 [num_rows, row_bytes(num_inputs)]."""
    return np.empty((num_rows, row_bytes(num_inputs)), dtype=np.uint8)


def records_of(rows: NDArray[np.uint8]) -> np.ndarray:
    """Quantized rows as records [rows, groups] of type `RECORD`, in the same memory."""
    return rows[:, : rows.shape[1] // RECORD_BYTES * RECORD_BYTES].view(RECORD)

"""Launches the fused rotary embedding and KV write on a GPU (or in Triton's interpreter)."""

import torch
import triton

from weir.kv.geometry import PAGE_TOKENS
from weir.ops.checks import check_dtype, check_kv_pages, check_rows, check_shape
from weir.ops.rotary_kv_write.kernel import rotary_kv_write_kernel

_BLOCK_HEADS = 4


def rotary_kv_write(
    query_key_value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Shapes and meaning as `reference.rotary_kv_write`. Tables are fp32, `positions` int32, `slots` int32 or int64.

    Positions and slots live on the device and are not checked against the tables and pages.

    Raises:
        ValueError: a shape, type or stride does not fit.
    """
    check_kv_pages(keys, values)
    num_kv_heads, head_dim = keys.shape[1], keys.shape[3]
    num_rows = query_key_value.shape[0]
    num_heads = query_key_value.shape[1] - 2 * num_kv_heads
    check_shape("query_key_value", query_key_value, (num_rows, None, head_dim))
    check_rows("query_key_value", query_key_value)
    if num_heads < 1 or head_dim % 2:
        raise ValueError(
            f"query_key_value has {query_key_value.shape[1]} heads of {head_dim}, expected more than "
            f"2 x {num_kv_heads} heads of an even size"
        )
    for name, table in (("cos", cos), ("sin", sin)):
        check_shape(name, table, (cos.shape[0], head_dim // 2))
        check_dtype(name, table, torch.float32)
        if not table.is_contiguous():
            raise ValueError(f"{name} must be contiguous")
    check_shape("positions", positions, (num_rows,))
    check_dtype("positions", positions, torch.int32)
    check_shape("slots", slots, (num_rows,))
    check_dtype("slots", slots, torch.int32, torch.int64)
    if num_rows == 0:
        return
    num_blocks = triton.cdiv(num_heads, _BLOCK_HEADS) + triton.cdiv(num_kv_heads, _BLOCK_HEADS)
    rotary_kv_write_kernel[num_rows, num_blocks](
        query_key_value,
        cos,
        sin,
        positions,
        slots,
        keys,
        values,
        query_key_value.stride(0),
        query_key_value.stride(1),
        cos.stride(0),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        BLOCK_HEADS=_BLOCK_HEADS,
        PAGE=PAGE_TOKENS,
        num_warps=1,
    )

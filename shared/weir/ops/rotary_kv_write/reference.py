"""Rotary embedding and the write of keys and values in plain torch."""

import torch

from weir.kv.geometry import PAGE_TOKENS


def rotary_kv_write(
    query_key_value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Rotates queries in place; writes rotated keys, and values, into the pages.

    `query_key_value` [rows, heads + 2 * kv heads, head_dim]: queries, keys, values. `cos`, `sin` [positions,
    head_dim / 2] turn the pairs (i, i + head_dim / 2). `positions`, `slots` [rows]; slot = page id * PAGE_TOKENS +
    offset in the page; a row whose slot is negative writes no key or value. `keys`, `values` [pages, kv heads,
    PAGE_TOKENS, head_dim].
    """
    num_kv_heads = keys.shape[1]
    num_heads = query_key_value.shape[1] - 2 * num_kv_heads
    row_cos, row_sin = cos[positions.long()][:, None], sin[positions.long()][:, None]
    queries = query_key_value[:, :num_heads]
    new_keys = query_key_value[:, num_heads : num_heads + num_kv_heads]
    new_values = query_key_value[:, num_heads + num_kv_heads :]
    rotated_keys = rotate(new_keys, row_cos, row_sin)
    queries.copy_(rotate(queries, row_cos, row_sin))
    kept = slots >= 0
    page_ids, offsets = slots[kept].long() // PAGE_TOKENS, slots[kept].long() % PAGE_TOKENS
    keys[page_ids, :, offsets] = rotated_keys[kept].to(keys.dtype)
    values[page_ids, :, offsets] = new_values[kept].to(values.dtype)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """In fp32, rounded once."""
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(heads.dtype)

"""Decode attention in plain torch: what every other implementation is compared with."""

import torch

from weir.kv.geometry import PAGE_TOKENS, num_pages_for


def paged_decode(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Each row attends to positions [0, length) of its sequence, in fp32.

    `queries` [rows, heads, head_dim]; `keys`, `values` [pages, kv heads, PAGE_TOKENS, head_dim]; `block_tables`
    [rows, pages a row]; `lengths` [rows]. Query head h reads key head h // (heads / kv heads). A row of length 0 is 0.
    """
    outputs = torch.zeros_like(queries)
    for row, length in enumerate(lengths.tolist()):
        if length:
            row_keys, row_values = gather_sequence(keys, values, block_tables[row], length)
            outputs[row] = attend(queries[row : row + 1], row_keys, row_values, length - 1, scale)[0].to(queries.dtype)
    return outputs


def gather_sequence(
    keys: torch.Tensor, values: torch.Tensor, block_table: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 copies [kv heads, length, head_dim] of the first `length` positions of one sequence."""
    page_ids = block_table[: num_pages_for(length)].long()

    def gathered(pages: torch.Tensor) -> torch.Tensor:
        rows = pages[page_ids].transpose(0, 1)
        return rows.reshape(rows.shape[0], len(page_ids) * PAGE_TOKENS, rows.shape[-1])[:, :length].float()

    return gathered(keys), gathered(values)


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first_position: int, scale: float
) -> torch.Tensor:
    """Query i of `queries` [queries, heads, head_dim] stands at `first_position + i` and sees no later position."""
    num_queries, num_heads, _ = queries.shape
    group = num_heads // keys.shape[0]
    scores = torch.einsum("qhd,hnd->hqn", queries.float(), keys.repeat_interleave(group, 0)) * scale
    positions = first_position + torch.arange(num_queries, device=queries.device)
    hidden = torch.arange(keys.shape[1], device=queries.device)[None, :] > positions[:, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqn,hnd->qhd", weights, values.repeat_interleave(group, 0))

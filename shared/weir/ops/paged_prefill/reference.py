"""Prefill attention in plain torch: what every other implementation is compared with."""

import torch

from weir.ops.paged_decode.reference import attend, gather_sequence


def paged_prefill(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    first_rows: torch.Tensor,
    ends: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Rows [first_rows[i], first_rows[i + 1]) of the flat batch are the last positions before ends[i] of sequence i.

    Each attends to its sequence's positions up to its own, in fp32; the chunk's keys and values are in the pages.
    `queries` [rows, heads, head_dim]; `keys`, `values` [pages, kv heads, PAGE_TOKENS, head_dim]; `block_tables`
    [sequences, pages a sequence]; `first_rows` [sequences + 1]; `ends` [sequences].
    """
    outputs = torch.zeros_like(queries)
    bounds = first_rows.tolist()
    for sequence, end in enumerate(ends.tolist()):
        first, last = bounds[sequence], bounds[sequence + 1]
        if first == last:
            continue
        row_keys, row_values = gather_sequence(keys, values, block_tables[sequence], end)
        attended = attend(queries[first:last], row_keys, row_values, end - (last - first), scale)
        outputs[first:last] = attended.to(queries.dtype)
    return outputs

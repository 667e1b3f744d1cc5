"""What each op computes, in plain torch: what the kernels are compared with."""

from typing import Literal, NamedTuple

import torch
from torch.nn import functional

from weir.kv.geometry import PAGE_TOKENS, num_pages_for

Activation = Literal["silu", "gelu_tanh"]
"""Of the gate of an MLP; GELU as Hendrycks and Gimpel approximate it (2016)."""


class HeadNorms(NamedTuple):
    """Norms of the heads of queries and keys, before they are rotated. `queries`, `keys` [head_dim]."""

    queries: torch.Tensor
    keys: torch.Tensor
    epsilon: float


def paged_decode(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Each row attends to positions [0, length) of its sequence, the last `window` of them, in fp32.

    `queries` [rows, heads, head_dim]; `keys`, `values` [pages, kv heads, PAGE_TOKENS, head_dim]; `block_tables`
    [rows, pages a row]; `lengths` [rows]. Query head h reads key head h // (heads / kv heads). A row of length 0 is 0.
    """
    outputs = torch.zeros_like(queries)
    for row, length in enumerate(lengths.tolist()):
        if length:
            row_keys, row_values = gather_sequence(keys, values, block_tables[row], length)
            query = queries[row : row + 1]
            attended = attend(query, row_keys, row_values, length - 1, scale, window, softcap)
            outputs[row] = attended[0].to(queries.dtype)
    return outputs


def paged_prefill(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    first_rows: torch.Tensor,
    ends: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Rows [first_rows[i], first_rows[i + 1]) of the flat batch are the last positions before ends[i] of sequence i.

    Each attends to its sequence's positions up to its own, the last `window` of them, in fp32; the chunk's keys and
    values are in the pages. `queries` [rows, heads, head_dim]; `keys`, `values` [pages, kv heads, PAGE_TOKENS,
    head_dim]; `block_tables` [sequences, pages a sequence]; `first_rows` [sequences + 1]; `ends` [sequences].
    """
    outputs = torch.zeros_like(queries)
    bounds = first_rows.tolist()
    for sequence, end in enumerate(ends.tolist()):
        first, last = bounds[sequence], bounds[sequence + 1]
        if first == last:
            continue
        row_keys, row_values = gather_sequence(keys, values, block_tables[sequence], end)
        start = end - (last - first)
        attended = attend(queries[first:last], row_keys, row_values, start, scale, window, softcap)
        outputs[first:last] = attended.to(queries.dtype)
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
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    first_position: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Query i of `queries` [queries, heads, head_dim] stands at `first_position + i` and sees no later position, and at
    most `window` of them. Scores s become softcap * tanh(s / softcap)."""
    num_queries, num_heads, _ = queries.shape
    group = num_heads // keys.shape[0]
    scores = torch.einsum("qhd,hnd->hqn", queries.float(), keys.repeat_interleave(group, 0)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    positions = first_position + torch.arange(num_queries, device=queries.device)[:, None]
    seen = torch.arange(keys.shape[1], device=queries.device)[None, :]
    hidden = seen > positions
    if window is not None:
        hidden = hidden | (seen <= positions - window)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqn,hnd->qhd", weights, values.repeat_interleave(group, 0))


def rotary_kv_write(
    query_key_value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    norms: HeadNorms | None = None,
) -> None:
    """Rotates queries in place; writes rotated keys, and values, into the pages. With `norms` both are normed before,
    and not rounded between.

    `query_key_value` [rows, heads + 2 * kv heads, head_dim]: queries, keys, values. `cos`, `sin` [positions,
    head_dim / 2] turn the pairs (i, i + head_dim / 2). `positions`, `slot_mapping` [rows]; the latter, as in vLLM, says
    where a row's key and value go: page id * PAGE_TOKENS + offset in the page, or nowhere if it is negative. `keys`,
    `values` [pages, kv heads, PAGE_TOKENS, head_dim].
    """
    num_kv_heads = keys.shape[1]
    num_heads = query_key_value.shape[1] - 2 * num_kv_heads
    row_cos, row_sin = cos[positions.long()][:, None], sin[positions.long()][:, None]
    queries = query_key_value[:, :num_heads]
    new_keys = query_key_value[:, num_heads : num_heads + num_kv_heads]
    new_values = query_key_value[:, num_heads + num_kv_heads :]
    normed_queries, normed_keys = norm_heads(queries, new_keys, norms)
    rotated_keys = rotate(normed_keys, row_cos, row_sin)
    queries.copy_(rotate(normed_queries, row_cos, row_sin))
    kept = slot_mapping >= 0
    page_ids, offsets = slot_mapping[kept].long() // PAGE_TOKENS, slot_mapping[kept].long() % PAGE_TOKENS
    keys[page_ids, :, offsets] = rotated_keys[kept].to(keys.dtype)
    values[page_ids, :, offsets] = new_values[kept].to(values.dtype)


def norm_heads(queries: torch.Tensor, keys: torch.Tensor, norms: HeadNorms | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Both [rows, heads, head_dim], normed in fp32 and not rounded; as they are without `norms`."""
    if norms is None:
        return queries, keys
    return rms_norm(queries.float(), norms.queries, norms.epsilon), rms_norm(keys.float(), norms.keys, norms.epsilon)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """In fp32, rounded once."""
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(heads.dtype)


def rms_norm(
    rows: torch.Tensor, weight: torch.Tensor, epsilon: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """[rows, hidden]: x / sqrt(mean(x^2) + epsilon) * weight, in fp32, rounded once.

    With a `residual` [rows, hidden], x is rows + residual, and the residual becomes that sum, rounded to its type.
    """
    values = rms_sum(rows, residual)
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon)
    return (normed * weight.float()).to(rows.dtype)


def linear(rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`rows` [rows, inputs] times `matrix` [outputs, inputs], and `bias` [outputs] added: fp32 [rows, outputs].

    In fp64, rounded once.
    """
    sums = rows.double() @ matrix.double().t()
    return (sums if bias is None else sums + bias.double()).float()


def rms_sum(rows: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """What `rms_norm` norms, in fp32; the residual becomes it."""
    if residual is None:
        return rows.float()
    residual.copy_(rows.float() + residual.float())
    return residual.float()


def gated(gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """[rows, 2 * width], gate then up, to activation(gate) * up [rows, width], in fp32, rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate = gate * torch.sigmoid(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    return (gate * up).to(gate_up.dtype)


def sample(logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """One token id a row, int32; -1 for a row with a NaN or infinite logit.

    `logits` fp32 [rows, vocabulary]; `temperatures` fp32 [rows], 0 is greedy (of equal logits the lowest id);
    `uniforms` fp64 [rows] in [0, 1): the token at which the cumulative distribution passes it, in order of ids, as
    `weir.model.sampler` does without top-k, top-p and min-p.
    """
    token_ids = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    for row in range(logits.shape[0]):
        token_ids[row] = _sample_row(logits[row], temperatures[row].item(), uniforms[row].item())
    return token_ids


def _sample_row(logits: torch.Tensor, temperature: float, uniform: float) -> int:
    if not bool(torch.isfinite(logits).all()):
        return -1
    if temperature == 0.0:
        return int((logits == logits.max()).nonzero()[0])
    shifted = logits.double() - logits.double().max()
    cumulative = (shifted / temperature).exp().cumsum(0)
    place = int((cumulative <= uniform * cumulative[-1]).sum())
    # rounding can carry the product up to the total: take the last token that has any weight
    return min(place, int((cumulative < cumulative[-1]).sum()))

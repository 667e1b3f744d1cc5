"""A step's plan as index tensors: one flat batch of tokens, and who attends to what.

Tokens of the flat batch, in order:

    | decode rows: chunks of one token, fewest pages first | prefill chunk | prefill chunk | …

Decode rows attend together, in groups of similar length: one gather and one kernel call a group were 1.6 to 2.1 times
faster than one a sequence at 8 and 32 sequences of 160 tokens. Prefill chunks attend one sequence at a time.

Where no layer sees further back than a window, pages before it are not gathered: they may hold anything by now.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from weir.engine.plan import ChunkPlan, StepPlan
from weir.kv.geometry import PAGE_TOKENS, first_page_read, num_pages_for
from weir.model.architecture import ModelConfig
from weir.model.rows import SampledRow, ScoredRows, ordered_chunks, rows_with_logits, whole
from weir.model.torch.paged_kv import PagedKv


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows [first, last) of the flat batch, one a sequence, padded to the pages of the one that reads most.

    `mask` [sequences, 1, 1, pages * PAGE_TOKENS], from the first page that is read on, is 0 where a row attends and
    -inf elsewhere. Behind a sequence's end its last page holds whatever was there before, even NaN, which no mask takes
    out: `stale` names those positions. `window_mask` is that of layers with a sliding window.
    """

    first: int
    last: int
    block_index: torch.Tensor
    mask: torch.Tensor
    window_mask: torch.Tensor
    stale: tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Rows [first, last) of the flat batch: consecutive positions of one sequence, the last of those that are read.

    `mask` [last - first, num_read] is True where a row attends, `window_mask` where it does in layers with a sliding
    window; both from the first page that is read on.
    """

    first: int
    last: int
    num_read: int
    block_index: torch.Tensor
    mask: torch.Tensor
    window_mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepBatch:
    """`token_ids` and `positions` are [tokens], `row_index` [tokens, kv heads]."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    row_index: torch.Tensor
    decode_groups: tuple[DecodeGroup, ...]
    prefill_chunks: tuple[PrefillChunk, ...]
    sampled: tuple[SampledRow, ...]
    scored: tuple[ScoredRows, ...]


def build_batch(plan: StepPlan, kv: PagedKv, config: ModelConfig) -> StepBatch:
    """Raises InternalError if the plan would read or write where it must not; then nothing was written."""
    decodes, prefills = ordered_chunks(plan, kv.num_pages, config.vocab_size, config.max_context_tokens)
    decodes.sort(key=lambda chunk: _num_pages_read(chunk, config))  # behind a window no longer one of the length
    chunks = [*decodes, *prefills]
    sampled, scored = rows_with_logits(whole(chunks))
    positions = torch.tensor([position for chunk in chunks for position in range(chunk.start, chunk.end)])
    pages = torch.tensor([c.block_table[p // PAGE_TOKENS] for c in chunks for p in range(c.start, c.end)])
    return StepBatch(
        token_ids=torch.tensor([token_id for chunk in chunks for token_id in chunk.token_ids]),
        positions=positions,
        row_index=kv.row_index(pages, positions % PAGE_TOKENS),
        decode_groups=_decode_groups(decodes, kv, config),
        prefill_chunks=_prefill_chunks(prefills, len(decodes), kv, config),
        sampled=sampled,
        scored=scored,
    )


def _first_page(chunk: ChunkPlan, config: ModelConfig) -> int:
    """That its queries read."""
    window = config.longest_window
    return 0 if window is None else first_page_read(chunk.start, window)


def _num_pages_read(chunk: ChunkPlan, config: ModelConfig) -> int:
    return num_pages_for(chunk.end) - _first_page(chunk, config)


def _decode_groups(decodes: Sequence[ChunkPlan], kv: PagedKv, config: ModelConfig) -> tuple[DecodeGroup, ...]:
    groups = []
    first = 0
    # in their order, by powers of two of their pages, so that less than half of what a group gathers is padding
    for _, members in groupby(decodes, key=lambda chunk: (_num_pages_read(chunk, config) - 1).bit_length()):
        group = list(members)
        groups.append(_decode_group(group, first, kv, config))
        first += len(group)
    return tuple(groups)


def _decode_group(group: Sequence[ChunkPlan], first: int, kv: PagedKv, config: ModelConfig) -> DecodeGroup:
    ends = torch.tensor([chunk.end for chunk in group])[:, None]
    num_pages = max(_num_pages_read(chunk, config) for chunk in group)
    tables = []
    for chunk in group:
        read = chunk.block_table[_first_page(chunk, config) : num_pages_for(chunk.end)]
        # padded with the first page that it reads: masked, but surely its own and written
        tables.append([*read, *[read[0]] * (num_pages - len(read))])
    first_positions = torch.tensor([_first_page(chunk, config) * PAGE_TOKENS for chunk in group])
    positions = first_positions[:, None] + torch.arange(num_pages * PAGE_TOKENS)
    behind = positions >= ends
    in_last_page = positions < (ends + PAGE_TOKENS - 1) // PAGE_TOKENS * PAGE_TOKENS
    mask = torch.zeros(behind.shape).masked_fill_(behind, float("-inf"))[:, None, None, :]
    window_mask = mask
    if config.window is not None:
        before = positions < ends - config.window.num_tokens
        window_mask = mask.masked_fill(before[:, None, None, :], float("-inf"))
    row, position = torch.nonzero(behind & in_last_page, as_tuple=True)
    block_index = kv.block_index(torch.tensor(tables))
    return DecodeGroup(first, first + len(group), block_index, mask, window_mask, (row, position))


def _prefill_chunks(
    prefills: Sequence[ChunkPlan], first: int, kv: PagedKv, config: ModelConfig
) -> tuple[PrefillChunk, ...]:
    chunks = []
    for chunk in prefills:
        num_rows, first_page = len(chunk.token_ids), _first_page(chunk, config)
        table = torch.tensor([chunk.block_table[first_page : num_pages_for(chunk.end)]])
        start, num_read = chunk.start - first_page * PAGE_TOKENS, chunk.end - first_page * PAGE_TOKENS
        mask = torch.ones(num_rows, num_read, dtype=torch.bool).tril_(start)
        window_mask = mask if config.window is None else mask.triu(start - config.window.num_tokens + 1)
        chunks.append(PrefillChunk(first, first + num_rows, num_read, kv.block_index(table), mask, window_mask))
        first += num_rows
    return tuple(chunks)

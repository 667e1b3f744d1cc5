"""A step's plan as the index arrays that the Triton kernels read.

Rows of the flat batch, in order:

    | decode rows: one token a sequence | prompt chunk | prompt chunk | ...

A prompt's chunk goes to the prefill kernel even if it is one token long: a position's keys and values must not depend
on how its prompt was cut, and the two kernels add in different orders.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from weir.core.errors import InternalError
from weir.engine.plan import ChunkPlan, SampleSpec, StepPlan
from weir.kv.geometry import PAGE_TOKENS, num_pages_for
from weir.model.rows import SampledRow, ScoredRows, ordered_chunks, rows_with_logits, whole
from weir.model.triton.memory import HostArray, StepUpload
from weir.ops.gpu.paged_prefill import tiles_of
from weir.ops.gpu.sampling import philox_uniform

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TritonLimits:
    """What the buffers have room for: tokens of one step, and its sequences."""

    max_rows: int
    max_sequences: int
    max_context_tokens: int

    @property
    def upload_bytes(self) -> int:
        """An upper bound of what `device_batch` sends."""
        pages = self.max_sequences * num_pages_for(self.max_context_tokens)
        return 4 * (5 * self.max_rows + pages) + 32 * self.max_sequences + 1024


@dataclass(frozen=True, slots=True)
class DecodeIndex:
    """Rows [0, decodes) of the flat batch: `block_tables` [decodes, width] and `lengths` [decodes], int32."""

    block_tables: torch.Tensor
    lengths: torch.Tensor


@dataclass(frozen=True, slots=True)
class PrefillIndex:
    """The rows behind the decodes, as `weir.ops.gpu.paged_prefill` wants them; `first_rows` counts from the first."""

    block_tables: torch.Tensor
    first_rows: torch.Tensor
    ends: torch.Tensor
    tile_list: torch.Tensor


@dataclass(frozen=True, slots=True)
class SampleIndex:
    """Of each sampled row: its number in the flat batch (int32), temperature (fp32, 0 is greedy), uniform (fp64)."""

    rows: torch.Tensor
    temperatures: torch.Tensor
    uniforms: torch.Tensor


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """On the device: `token_ids`, `positions`, `slot_mapping` int32 [rows], and who attends to what.

    `slot_mapping` says where a row's key and value go (`weir.ops.reference`); a request's slot is something else.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    decode: DecodeIndex | None
    prefill: PrefillIndex | None
    sample: SampleIndex | None


@dataclass(frozen=True, slots=True)
class HostBatch:
    """The plan's chunks in the order of the flat batch."""

    decodes: tuple[ChunkPlan, ...]
    prefills: tuple[ChunkPlan, ...]
    sampled: tuple[SampledRow, ...]
    scored: tuple[ScoredRows, ...]


def host_batch(plan: StepPlan, num_pages: int, vocab_size: int, limits: TritonLimits) -> HostBatch:
    """Raises InternalError if the plan would read or write where it must not, or is too large."""
    short, long = ordered_chunks(plan, num_pages, vocab_size, limits.max_context_tokens)
    decodes = tuple(chunk for chunk in short if _is_decode(chunk))
    prefills = (*(chunk for chunk in short if not _is_decode(chunk)), *long)
    if plan.num_tokens > limits.max_rows or len(plan.chunks) > limits.max_sequences:
        raise InternalError(
            f"step plan: {plan.num_tokens} tokens of {len(plan.chunks)} sequences, the runner has room for "
            f"{limits.max_rows} of {limits.max_sequences}"
        )
    return HostBatch(decodes, prefills, *rows_with_logits(whole((*decodes, *prefills))))


def _is_decode(chunk: ChunkPlan) -> bool:
    """Of chunks of one token: the next of an output, not the last of a prompt."""
    return chunk.sample is not None and chunk.sample.output_index > 0


def is_sampled_on_device(spec: SampleSpec) -> bool:
    """Greedy, or a temperature and nothing else."""
    params = spec.params
    return not (
        spec.masked_token_ids
        or params.top_k > 0
        or params.top_p < 1.0
        or params.min_p > 0.0
        or params.has_penalties
        or params.logit_bias
        or params.logprobs is not None
    )


def device_batch(batch: HostBatch, upload: StepUpload, queries_per_tile: int) -> DeviceBatch:
    """One copy to the device; the views are valid until the next."""
    arrays = [
        *_row_arrays((*batch.decodes, *batch.prefills)),
        *(_decode_arrays(batch.decodes) if batch.decodes else ()),
        *(_prefill_arrays(batch.prefills, queries_per_tile) if batch.prefills else ()),
        *(_sample_arrays(batch.sampled) if batch.sampled else ()),
    ]
    views = iter(upload.send(arrays))
    return DeviceBatch(
        next(views),
        next(views),
        next(views),
        DecodeIndex(next(views), next(views)) if batch.decodes else None,
        PrefillIndex(next(views), next(views), next(views), next(views)) if batch.prefills else None,
        SampleIndex(next(views), next(views), next(views)) if batch.sampled else None,
    )


def padded_decodes(batch: HostBatch, num_rows: int, table_width: int, upload: StepUpload) -> DeviceBatch:
    """As `device_batch`, for a batch of decodes alone, filled up to `num_rows` rows and `table_width` pages a row.

    Batches of one such shape lie at the same addresses. A row that fills up writes to no page (its slot mapping is -1)
    and reads one position of page 0; what is sampled for it means nothing.
    """
    filled: list[HostArray] = [
        np.zeros(num_rows, np.int32),  # token ids
        np.zeros(num_rows, np.int32),  # positions
        np.full(num_rows, -1, np.int32),  # slot mapping
        np.zeros((num_rows, table_width), np.int32),
        np.ones(num_rows, np.int32),  # lengths
        np.arange(num_rows, dtype=np.int32),
        np.zeros(num_rows, np.float32),  # temperatures
        np.zeros(num_rows, np.float64),  # uniforms
    ]
    if batch.decodes:
        tables, lengths = _decode_arrays(batch.decodes)
        found: list[HostArray] = [*_row_arrays(batch.decodes), tables, lengths, *_sample_arrays(batch.sampled)]
        for target, source in zip(filled, found, strict=True):
            target[tuple(slice(length) for length in source.shape)] = source
    token_ids, positions, slot_mapping, block_tables, ends, rows, temperatures, uniforms = upload.send(filled)
    return DeviceBatch(
        token_ids,
        positions,
        slot_mapping,
        DecodeIndex(block_tables, ends),
        None,
        SampleIndex(rows, temperatures, uniforms),
    )


def _row_arrays(chunks: Sequence[ChunkPlan]) -> tuple[Ints, Ints, Ints]:
    """Token ids, positions and slot mapping."""
    return (
        np.concatenate([np.array(chunk.token_ids, np.int32) for chunk in chunks]),
        np.concatenate([np.arange(chunk.start, chunk.end, dtype=np.int32) for chunk in chunks]),
        np.concatenate([_slot_mapping(chunk) for chunk in chunks]),
    )


def _slot_mapping(chunk: ChunkPlan) -> Ints:
    positions = np.arange(chunk.start, chunk.end, dtype=np.int32)
    pages = np.array(chunk.block_table, np.int32)[positions // PAGE_TOKENS]
    slot_mapping: Ints = pages * PAGE_TOKENS + positions % PAGE_TOKENS
    return slot_mapping


def _tables(chunks: Sequence[ChunkPlan]) -> Ints:
    """Padded with page 0, which no kernel reads: lengths end before."""
    counts = [num_pages_for(chunk.end) for chunk in chunks]
    tables = np.zeros((len(chunks), max(counts)), np.int32)
    for row, (chunk, count) in enumerate(zip(chunks, counts, strict=True)):
        tables[row, :count] = chunk.block_table[:count]
    return tables


def _decode_arrays(chunks: Sequence[ChunkPlan]) -> tuple[Ints, Ints]:
    return _tables(chunks), np.array([chunk.end for chunk in chunks], np.int32)


def _prefill_arrays(chunks: Sequence[ChunkPlan], queries_per_tile: int) -> tuple[Ints, Ints, Ints, Ints]:
    lengths = [len(chunk.token_ids) for chunk in chunks]
    ends = [chunk.end for chunk in chunks]
    first_rows = np.cumsum([0, *lengths]).astype(np.int32)
    tiles = np.array(tiles_of(lengths, ends, queries_per_tile), np.int32)
    return _tables(chunks), first_rows, np.array(ends, np.int32), tiles


def _sample_arrays(
    sampled: Sequence[SampledRow],
) -> tuple[Ints, npt.NDArray[np.float32], npt.NDArray[np.float64]]:
    params = [row.spec.params for row in sampled]
    return (
        np.array([row.row for row in sampled], np.int32),
        np.array([0.0 if each.is_greedy else each.temperature for each in params], np.float32),
        np.array([philox_uniform(row.spec.params.seed, row.spec.output_index) for row in sampled], np.float64),
    )

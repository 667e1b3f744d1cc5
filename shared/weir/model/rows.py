"""The rows of a step's flat batch: in which order chunks are computed, what every runner refuses, and whose logits are
wanted.

A row is a token. Runners lay chunks out one behind the other; what a runner computes in several passes it cuts into
pieces of chunks, each with rows of its own pass.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from weir.core.errors import InternalError
from weir.engine.plan import ChunkPlan, SampleSpec, ScoreSpec, StepPlan
from weir.kv.geometry import num_pages_for


class SampledRow(NamedTuple):
    """The row whose logits give the next token of the sequence in `slot`."""

    slot: int
    row: int
    spec: SampleSpec


class ScoredRows(NamedTuple):
    """Rows from `first_row` on, one an entry of `spec.next_token_ids`, whose logits give prompt logprobs of `slot`."""

    slot: int
    first_row: int
    spec: ScoreSpec

    @property
    def rows(self) -> range:
        return range(self.first_row, self.first_row + len(self.spec.next_token_ids))


class Piece(NamedTuple):
    """Positions [start, end) of a chunk."""

    chunk: ChunkPlan
    start: int
    end: int


def whole(chunks: Iterable[ChunkPlan]) -> list[Piece]:
    return [Piece(chunk, chunk.start, chunk.end) for chunk in chunks]


def ordered_chunks(
    plan: StepPlan, num_pages: int, vocab_size: int, max_context_tokens: int
) -> tuple[list[ChunkPlan], list[ChunkPlan]]:
    """Chunks of one token, shortest context first, and the others.

    Raises:
        InternalError: the plan would read or write where it must not.
    """
    for chunk in plan.chunks:
        _check(chunk, num_pages, vocab_size, max_context_tokens)
    slots = [chunk.slot for chunk in plan.chunks]
    if len(set(slots)) != len(slots):
        raise InternalError(f"step plan: a slot has two chunks (slots {sorted(slots)})")
    decodes = sorted((chunk for chunk in plan.chunks if len(chunk.token_ids) == 1), key=lambda chunk: chunk.end)
    return decodes, [chunk for chunk in plan.chunks if len(chunk.token_ids) > 1]


def rows_with_logits(
    pieces: Iterable[Piece], first_row: int = 0
) -> tuple[tuple[SampledRow, ...], tuple[ScoredRows, ...]]:
    """Of pieces in this order, which begin at `first_row`. A chunk is sampled after its last token, and scored piece by
    piece."""
    sampled: list[SampledRow] = []
    scored: list[ScoredRows] = []
    for chunk, start, end in pieces:
        if chunk.score is not None:
            next_token_ids = chunk.score.next_token_ids[start - chunk.start : end - chunk.start]
            scored.append(ScoredRows(chunk.slot, first_row, ScoreSpec(next_token_ids, chunk.score.num_top)))
        first_row += end - start
        if chunk.sample is not None and end == chunk.end:
            sampled.append(SampledRow(chunk.slot, first_row - 1, chunk.sample))
    return tuple(sampled), tuple(scored)


def check_logits(non_finite_rows: Sequence[int], num_rows: int) -> None:
    """Raises InternalError if there are rows with a NaN or infinite logit: no token of the step may be used then."""
    if non_finite_rows:
        raise InternalError(
            f"the model computed NaN or infinite logits in {len(non_finite_rows)} of {num_rows} rows: "
            f"{list(non_finite_rows[:8])}"
        )


def _check(chunk: ChunkPlan, num_pages: int, vocab_size: int, max_context_tokens: int) -> None:
    token_ids, table, end = chunk.token_ids, chunk.block_table, chunk.end
    if not token_ids or chunk.start < 0:
        problem = f"{len(token_ids)} tokens from position {chunk.start}"
    elif end > max_context_tokens:
        problem = f"reaches position {end}, the model's context is {max_context_tokens}"
    elif len(table) < num_pages_for(end):
        problem = f"{len(table)} pages for {end} positions"
    elif min(table) < 0 or max(table) >= num_pages:
        problem = f"block table {table} with {num_pages} pages"
    elif min(token_ids) < 0 or max(token_ids) >= vocab_size:
        problem = f"a token id is outside the vocabulary of {vocab_size}"
    else:
        return
    raise InternalError(f"step plan, slot {chunk.slot}: {problem}")

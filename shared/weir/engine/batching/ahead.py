"""A step planned while the one before it runs, for a runner that launches steps without waiting for what they sample.

    step n       decide ── launch ────────── runs ──────────> record ── report
    step n + 1                └ plan ahead ── launch ──────── runs ─────────────> record ── report

The sequences that step n decodes go on, each after the token that step n samples for it: the runner knows that token
before the host does. A sequence that ends by that token has one row too many in step n + 1; what is sampled there is
thrown away, and its pages are released when step n + 1 has ended, since that step still writes to them. Anything but
going on (a prompt, somebody who waits, a pause, a page that is missing) is decided by an ordinary step once nothing
runs. SGLang calls it the overlap scheduler, vLLM asynchronous scheduling.
"""

from collections.abc import Sequence as Seq

from weir.engine.memory.pages import PagePool
from weir.engine.plan import ChunkPlan
from weir.engine.sequence import Sequence, Stage
from weir.kv.geometry import PAGE_TOKENS


def going_on(chunks: Seq[ChunkPlan], owners: Seq[Sequence | None], members: Seq[Sequence]) -> list[Sequence] | None:
    """Those of a running step that decode, are still there and are all that there is; None if anything else is to be
    decided. `members`: of the batch, also who waits for it."""
    alive = set(members)
    decoding = []
    for chunk, sequence in zip(chunks, owners, strict=True):
        if sequence is None or chunk.sample is None or chunk.score is not None or len(chunk.token_ids) != 1:
            return None
        if sequence in alive:
            decoding.append(sequence)
    if len(decoding) < len(members) or not all(map(_only_decodes, members)):
        return None
    return decoding


def _only_decodes(sequence: Sequence) -> bool:
    """A history of tokens (for penalties) would lack the one that is not known yet, and so would a grammar's mask."""
    return (
        sequence.stage is Stage.RUNNING
        and sequence.preempted_since_s is None
        and sequence.stalled_since_s is None
        and sequence.history is None
        and sequence.grammar is None
        and sequence.num_uncomputed == 1
    )


def try_plan_ahead(
    decoding: Seq[Sequence], pool: PagePool, max_context_tokens: int
) -> tuple[list[ChunkPlan], list[Sequence]] | None:
    """The next chunk of each and its sequence, without those that end by length. None: for none, or one lacks a page;
    pages that others got meanwhile are theirs."""
    chunks, owners = [], []
    for sequence in decoding:
        start = sequence.num_computed + 1
        if start + 1 >= min(sequence.max_num_tokens, max_context_tokens):
            continue  # ended by the token that the running step samples
        if start >= len(sequence.block_table) * PAGE_TOKENS:
            if len(sequence.block_table) >= sequence.params.num_reserved_pages:
                return None
            page_ids = pool.try_take(1)
            if page_ids is None:
                return None
            sequence.grow(page_ids[0])
        chunks.append(sequence.plan_decode_ahead())
        owners.append(sequence)
    return (chunks, owners) if chunks else None

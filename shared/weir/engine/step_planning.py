"""What of the running batch is computed in a step, and the pages that this takes."""

from dataclasses import dataclass, field

from weir.engine.batcher import BatchLimits
from weir.engine.held_rows import HeldRows
from weir.engine.pages import PagePool
from weir.engine.plan import ChunkPlan
from weir.engine.prompts import in_turn, is_below, note_turn
from weir.engine.sequence import Sequence
from weir.engine.step_share import Shares
from weir.kv.geometry import PAGE_TOKENS


@dataclass(slots=True)
class Draft:
    """A step as far as there are pages. `owners` of the chunks; None: of a sequence that has ended."""

    chunks: list[ChunkPlan] = field(default_factory=list)
    owners: list[Sequence | None] = field(default_factory=list)
    stalled: list[Sequence] = field(default_factory=list)
    """There is no page for them."""
    unbooked: list[Sequence] = field(default_factory=list)
    """They want more pages than were booked for them."""


class StepPlanner:
    """Decodes first, then prompts, unless `shares` (a policy's) says otherwise."""

    def __init__(self, limits: BatchLimits, pool: PagePool, held: HeldRows) -> None:
        self._limits = limits
        self._pool = pool
        self._held = held
        self.shares: Shares | None = None

    def plan(self, present: list[Sequence], now_s: float) -> Draft:
        """`present`: those that take part, in order."""
        draft = Draft()
        budget = self._limits.max_num_batched_tokens - len(self._held)
        decodes, prompts = [], []
        for sequence in present:
            num_computed = sequence.num_computed
            if len(sequence.token_ids) - num_computed > 1:
                prompts.append(sequence)
                continue
            has_room = sequence.stalled_since_s is None and num_computed < len(sequence.block_table) * PAGE_TOKENS
            if has_room or self._try_grow(sequence, 1, draft):
                decodes.append(sequence)
        num_prompt_tokens = budget - len(decodes)
        if self.shares is not None:
            decodes, num_prompt_tokens = self.shares.split(decodes, prompts, budget, now_s)
        elif num_prompt_tokens < 0:
            decodes = decodes[:budget]
        if len(self._held):
            draft.chunks += self._held.chunks()
            draft.owners += [None] * len(self._held)
        draft.chunks += [sequence.plan_decode() for sequence in decodes]
        draft.owners += decodes
        if prompts:
            self._plan_prompts(prompts, num_prompt_tokens, draft)
        return draft

    def _plan_prompts(self, prompts: list[Sequence], budget: int, draft: Draft) -> None:
        served: list[Sequence] = []
        for sequence in in_turn(prompts):
            if budget <= 0 or is_below(sequence, served):
                break
            num_tokens = min(sequence.num_uncomputed, self._limits.chunk_tokens, budget)
            if self._try_grow(sequence, num_tokens, draft):
                chunk = sequence.plan_chunk(num_tokens)
                budget -= len(chunk.token_ids)
                draft.chunks.append(chunk)
                draft.owners.append(sequence)
                served.append(sequence)
        note_turn(prompts, served)

    def _try_grow(self, sequence: Sequence, num_tokens: int, draft: Draft) -> bool:
        """Gives a sequence the pages for its next tokens. False: it cannot be computed in this step."""
        num_missing = sequence.num_missing_pages(num_tokens)
        if len(sequence.block_table) + num_missing > sequence.facts.num_booked_pages:
            draft.unbooked.append(sequence)
            return False
        page_ids = self._pool.try_take(num_missing) if num_missing else ()
        if page_ids is None:
            draft.stalled.append(sequence)
            return False
        for page_id in page_ids:
            sequence.grow(page_id)
        sequence.stalled_since_s = None
        return True

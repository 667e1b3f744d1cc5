"""What of the running batch is computed in a step, and the pages that this takes.

A prompt of a more urgent lane than some decodes goes without them: reading what they have in pages would make its step
longer, and its first token later. They sit out one step at a time and never two in a row, so that whatever comes, every
decode is in at least every other step. A policy's `shares` decide for all lanes alike.
"""

from dataclasses import dataclass, field

from weir.engine.batching.batcher import BatchLimits
from weir.engine.batching.prompts import in_turn, is_below, note_turn
from weir.engine.batching.step_pace import StepPace
from weir.engine.batching.step_share import Shares
from weir.engine.memory.held_rows import HeldRows
from weir.engine.memory.pages import PagePool
from weir.engine.plan import ChunkPlan
from weir.engine.sequence import Sequence
from weir.kv.geometry import PAGE_TOKENS


@dataclass(slots=True)
class Draft:
    """A step as far as there are pages. `owners` of the chunks; None: of a sequence that has ended."""

    chunks: list[ChunkPlan] = field(default_factory=list)
    owners: list[Sequence | None] = field(default_factory=list)
    stalled: list[Sequence] = field(default_factory=list)
    """There is no page for them."""
    unreserved: list[Sequence] = field(default_factory=list)
    """They want more pages than were booked for them."""


class StepPlanner:
    """Decodes first, then prompts, unless `shares` (a policy's) says otherwise."""

    def __init__(self, limits: BatchLimits, pool: PagePool, held: HeldRows, pace: StepPace) -> None:
        self._limits = limits
        self._pace = pace
        self._pool = pool
        self._held = held
        self.shares: Shares | None = None
        self._has_sat_out = False
        """Whether decodes sat out the step that was planned last."""

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
        sitting_out: list[Sequence] = []
        if self.shares is None:
            decodes, sitting_out = self._part(decodes, prompts)
        num_prompt_tokens = min(budget - len(decodes), self._pace.num_tokens)
        if self.shares is not None:
            budget = min(budget, len(decodes) + self._pace.num_tokens)
            decodes, num_prompt_tokens = self.shares.split(decodes, prompts, budget, now_s, self._pace.cost)
        elif num_prompt_tokens < 0:
            decodes = decodes[:budget]
        if len(self._held):
            draft.chunks += self._held.chunks()
            draft.owners += [None] * len(self._held)
        draft.chunks += [sequence.plan_decode() for sequence in decodes]
        draft.owners += decodes
        num_chunks = len(draft.chunks)
        self._pace.planned(self._plan_prompts(prompts, num_prompt_tokens, draft) if prompts else 0)
        self._has_sat_out = bool(sitting_out) and len(draft.chunks) > num_chunks
        if sitting_out and not self._has_sat_out:  # there was no page for the prompt
            draft.chunks += [sequence.plan_decode() for sequence in sitting_out]
            draft.owners += sitting_out
        return draft

    def _part(self, decodes: list[Sequence], prompts: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Those that run beside the prompts, and those that sit out for the first of them."""
        if not prompts or self._has_sat_out:
            return decodes, []
        lane_priority = in_turn(prompts)[0].params.scheduling.lane_priority
        sitting_out = [sequence for sequence in decodes if sequence.params.scheduling.lane_priority < lane_priority]
        if not sitting_out:
            return decodes, []
        return [
            sequence for sequence in decodes if sequence.params.scheduling.lane_priority >= lane_priority
        ], sitting_out

    def _plan_prompts(self, prompts: list[Sequence], budget: int, draft: Draft) -> int:
        """How many tokens were planned."""
        served: list[Sequence] = []
        num_planned = 0
        for sequence in in_turn(prompts):
            if budget <= 0 or is_below(sequence, served):
                break
            num_tokens = min(sequence.num_uncomputed, self._limits.chunk_tokens, budget)
            if self._try_grow(sequence, num_tokens, draft):
                chunk = sequence.plan_chunk(num_tokens)
                budget -= len(chunk.token_ids)
                num_planned += len(chunk.token_ids)
                draft.chunks.append(chunk)
                draft.owners.append(sequence)
                served.append(sequence)
        note_turn(prompts, served)
        return num_planned

    def _try_grow(self, sequence: Sequence, num_tokens: int, draft: Draft) -> bool:
        """Gives a sequence the pages for its next tokens. False: it cannot be computed in this step."""
        num_missing = sequence.num_missing_pages(num_tokens)
        if len(sequence.block_table) + num_missing > sequence.params.num_reserved_pages:
            draft.unreserved.append(sequence)
            return False
        page_ids = self._pool.try_take(num_missing) if num_missing else ()
        if page_ids is None:
            draft.stalled.append(sequence)
            return False
        for page_id in page_ids:
            sequence.grow(page_id)
        sequence.stalled_since_s = None
        return True

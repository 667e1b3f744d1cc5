"""What of the running batch is computed in a step, and the pages that this takes.

A prompt of a more urgent lane than some decodes goes without them: attending to what they have in pages would make its
step longer, and its first token later. They are left out one step at a time and never two in a row, so that whatever
comes, every decode is in at least every other step. A policy's step budget decides for all lanes alike.
"""

from dataclasses import dataclass, field

from weir.engine.batching.batcher import BatchLimits
from weir.engine.batching.followed_policy import FollowedPolicy
from weir.engine.batching.own_rules import HeldRows
from weir.engine.batching.prompt_share import StepPace, in_turn, is_less_urgent, is_shared_out, note_turn, share_out
from weir.engine.batching.step_shares import NO_SHARES
from weir.engine.memory.pages import PagePool
from weir.engine.plan import ChunkPlan
from weir.engine.sequence import Sequence
from weir.kv.geometry import PAGE_TOKENS


@dataclass(slots=True)
class StepDraft:
    """A step as far as there are pages. `owners` of the chunks; None: of a sequence that has ended."""

    chunks: list[ChunkPlan] = field(default_factory=list)
    owners: list[Sequence | None] = field(default_factory=list)
    stalled: list[Sequence] = field(default_factory=list)
    """There is no page for them."""
    over_reservation: list[Sequence] = field(default_factory=list)
    """They want more pages than are reserved for them."""


class StepPlanner:
    """Decodes first, then prompts, unless the policy has a step budget."""

    def __init__(
        self, limits: BatchLimits, pool: PagePool, held: HeldRows, pace: StepPace, policy: FollowedPolicy
    ) -> None:
        self.limits = limits
        self.shares = NO_SHARES
        self._pace = pace
        self._pool = pool
        self._held = held
        self._policy = policy
        self._has_left_out = False
        """Whether decodes were left out of the step that was planned last."""

    def plan(self, present: list[Sequence], now_s: float) -> StepDraft:
        """`present`: those that take part, in order."""
        draft = StepDraft()
        num_tokens = self.limits.max_num_batched_tokens - len(self._held)
        decodes, prompts = [], []
        for sequence in present:
            num_computed = sequence.num_computed
            if len(sequence.token_ids) - num_computed > 1:
                prompts.append(sequence)
                continue
            has_room = sequence.stalled_since_s is None and num_computed < len(sequence.block_table) * PAGE_TOKENS
            if has_room or self._try_grow(sequence, 1, draft):
                decodes.append(sequence)
        if self._policy.step_budget is not None:
            runnable = decodes[: max(0, num_tokens)]
            num_tokens = min(num_tokens, len(decodes) + self._pace.num_tokens)
            decodes, num_prompt_tokens = self._policy.split(decodes, prompts, num_tokens, now_s)
            left_out = [] if decodes else runnable
        else:
            decodes, left_out = self._leave_out(decodes, prompts)
            # Decodes are more than the budget only while it was lowered, and none of them stops for that.
            num_prompt_tokens = max(0, min(num_tokens - len(decodes), self._pace.num_tokens))
        if len(self._held):
            draft.chunks += self._held.chunks()
            draft.owners += [None] * len(self._held)
        draft.chunks += [sequence.plan_decode() for sequence in decodes]
        draft.owners += decodes
        num_chunks = len(draft.chunks)
        self._pace.planned(self._plan_prompts(prompts, num_prompt_tokens, draft) if prompts else 0)
        self._has_left_out = bool(left_out) and len(draft.chunks) > num_chunks
        if left_out and not self._has_left_out:  # no page for the prompts: those who decode may have them all
            draft.chunks += [sequence.plan_decode() for sequence in left_out]
            draft.owners += left_out
            self._policy.drop_split()
        return draft

    def _leave_out(self, decodes: list[Sequence], prompts: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Those that run beside the prompts, and those that are left out for the first of them."""
        if not prompts or self._has_left_out:
            return decodes, []
        lane_priority = in_turn(prompts)[0].params.scheduling.lane_priority
        left_out = [sequence for sequence in decodes if sequence.params.scheduling.lane_priority < lane_priority]
        if not left_out:
            return decodes, []
        return [s for s in decodes if s.params.scheduling.lane_priority >= lane_priority], left_out

    def _plan_prompts(self, prompts: list[Sequence], max_tokens: int, draft: StepDraft) -> int:
        """How many tokens were planned."""
        if is_shared_out(self.shares, prompts):
            return self._plan_shares(prompts, max_tokens, draft)
        served: list[Sequence] = []
        num_left = max_tokens
        for sequence in in_turn(prompts):
            if num_left <= 0 or is_less_urgent(sequence, served):
                break
            num_tokens = min(sequence.num_uncomputed, self.limits.chunk_tokens, num_left)
            if self._try_grow(sequence, num_tokens, draft):
                chunk = sequence.plan_chunk(num_tokens)
                num_left -= len(chunk.token_ids)
                draft.chunks.append(chunk)
                draft.owners.append(sequence)
                served.append(sequence)
        note_turn(prompts, served)
        _forget_stalls(prompts, draft)
        return max_tokens - num_left

    def _plan_shares(self, prompts: list[Sequence], max_tokens: int, draft: StepDraft) -> int:
        """As `_plan_prompts`, where lanes have shares. What one that lacks a page cannot use goes to the others."""
        able, chunk_tokens = prompts, self.limits.chunk_tokens
        while True:
            turns = share_out(self.shares, able, max_tokens, chunk_tokens=chunk_tokens, max_rows=len(able))
            unable = {sequence for sequence, num_tokens in turns if not self._try_grow(sequence, num_tokens, draft)}
            if not unable:
                break
            able = [sequence for sequence in able if sequence not in unable]
        draft.chunks += [sequence.plan_chunk(num_tokens) for sequence, num_tokens in turns]
        draft.owners += [sequence for sequence, _ in turns]
        note_turn(prompts, [sequence for sequence, _ in turns])
        _forget_stalls(prompts, draft)
        return sum(num_tokens for _, num_tokens in turns)

    def _try_grow(self, sequence: Sequence, num_tokens: int, draft: StepDraft) -> bool:
        """Gives a sequence the pages for its next tokens. False: it cannot be computed in this step."""
        num_missing = sequence.num_missing_pages(num_tokens)
        if len(sequence.block_table) + num_missing > sequence.params.num_reserved_pages:
            draft.over_reservation.append(sequence)
            return False
        page_ids = self._pool.try_take(num_missing) if num_missing else ()
        if page_ids is None:
            draft.stalled.append(sequence)
            return False
        for page_id in page_ids:
            sequence.grow(page_id)
        sequence.stalled_since_s = None
        return True


def _forget_stalls(prompts: list[Sequence], draft: StepDraft) -> None:
    """Whom this step does not get to does not wait for pages, although it lacked some once."""
    for sequence in prompts:
        if sequence not in draft.stalled:
            sequence.stalled_since_s = None

"""The prefill batcher: prompts in chunks, several a step under one budget of tokens.

In order, the most urgent lane first: an urgent prompt that comes while others are half read goes first from the next
step on, and has a place at once where less urgent ones have them all. The scheduler decides the order in a lane. A
prompt gets a slot and all its pages at once, so that two prompts never hold half of what each needs, and not before a
step gets to it: pages in which nothing is written yet are few, however small steps are.
"""

from weir.engine.batching.batcher import Batcher, BatchLimits
from weir.engine.batching.pausing import MAX_OVERBOOKING
from weir.engine.batching.prompts import in_turn, is_below, note_turn
from weir.engine.memory.page_claims import PageClaimer, Unrecordable
from weir.engine.memory.pages import PageNeed, PagePool
from weir.engine.messages import Arrival, Failure, FailureReason, HandOffReady
from weir.engine.plan import ChunkPlan
from weir.engine.sequence import OpenLog, Sequence, Stage

_STEPS_AHEAD = 2
"""Whom the next step gets to has its pages asked for in this one."""


class PrefillBatcher(Batcher):
    """Draws token 0 of each prompt, then holds slot and pages until the hand-off is settled."""

    def __init__(self, limits: BatchLimits, pool: PagePool, open_log: OpenLog) -> None:
        super().__init__(limits, pool)
        self._placer = PageClaimer(pool, open_log)

    def add(self, arrival: Arrival) -> None:
        self._add_prompt(arrival)

    def need(self) -> PageNeed:
        """The pages of all prompts that this step and the next one get to, were there pages."""
        num_tokens = _STEPS_AHEAD * self.pace.num_tokens
        pages = []
        for sequence in in_turn(self._candidates()):
            if num_tokens <= 0:
                break
            num_tokens -= min(sequence.num_uncomputed, self.limits.chunk_tokens)
            if sequence.stage is Stage.WAITING:
                pages.append(sequence.num_missing_pages(sequence.num_uncomputed))
        return PageNeed(
            num_pages=sum(pages),
            num_slots=len(pages),
            head_pages=pages[0] if pages else 0,
            head_slots=1 if pages else 0,
        )

    def _plan_chunks(self, now_s: float) -> tuple[list[ChunkPlan], list[Sequence | None]]:
        num_tokens = budget = self.pace.num_tokens
        candidates = self._candidates()
        self._place(candidates, budget, now_s)
        chunks: list[ChunkPlan] = []
        owners: list[Sequence | None] = []
        served: list[Sequence] = []
        prompts = [sequence for sequence in candidates if sequence.stage is Stage.RUNNING]
        for sequence in in_turn(prompts)[: self.limits.max_num_seqs]:
            if budget <= 0 or is_below(sequence, served):
                break
            chunk = sequence.plan_chunk(min(budget, self.limits.chunk_tokens))
            budget -= len(chunk.token_ids)
            chunks.append(chunk)
            owners.append(sequence)
            served.append(sequence)
        # In a lane nobody is passed over for ever: those before one come to their end.
        most_urgent = max((sequence.params.scheduling.lane_priority for sequence in served), default=0)
        note_turn([s for s in candidates if s.params.scheduling.lane_priority < most_urgent], served)
        self.pace.planned(num_tokens - budget)
        return chunks, owners

    def _begun(self, sequence: Sequence) -> None:
        assert sequence.slot is not None, "only a placed sequence is computed"
        sequence.stage = Stage.HANDING_OFF
        self._events.append(HandOffReady(sequence.key, sequence.slot, sequence.block_table))

    def _candidates(self) -> list[Sequence]:
        """Those that are being read, and those that may be placed now, in order."""
        placeable = set(self._placeable())
        return [s for s in self._ranked() if s.stage is Stage.RUNNING or s in placeable]

    def _placeable(self) -> list[Sequence]:
        """Those that wait and may be placed now. Hand-offs count: a transfer service that is away stops new prompts,
        not pages from running out. Over the places only as many as outrank somebody who is being read."""
        ranked, max_num_seqs = self._ranked(), self.limits.max_num_seqs
        waiting = [sequence for sequence in ranked if sequence.stage is Stage.WAITING]
        num_placed = len(ranked) - len(waiting)
        num_free = max(0, max_num_seqs - num_placed)
        placeable = waiting[:num_free]
        read = [sequence.params.scheduling.lane_priority for sequence in ranked if sequence.stage is Stage.RUNNING]
        num_over = max(0, num_placed - max_num_seqs)
        for sequence in waiting[num_free:]:
            num_lower = sum(lane_priority < sequence.params.scheduling.lane_priority for lane_priority in read)
            if num_over >= min(num_lower, (MAX_OVERBOOKING - 1) * max_num_seqs):
                break
            placeable.append(sequence)
            num_over += 1
        return placeable

    def _place(self, candidates: list[Sequence], num_tokens: int, now_s: float) -> None:
        """Those to which so many tokens get. Only a more urgent one overtakes one that lacks pages."""
        stalled: list[Sequence] = []
        for sequence in in_turn(candidates):
            if num_tokens <= 0:
                break
            if sequence.stage is Stage.WAITING:
                is_behind = any(
                    s.params.scheduling.lane_priority >= sequence.params.scheduling.lane_priority for s in stalled
                )
                if is_behind or not self._try_place(sequence):
                    stalled.append(sequence)
                    continue
            num_tokens -= min(sequence.num_uncomputed, self.limits.chunk_tokens)
        if self._may_be_overdue:
            for waiting in self._ranked():
                if waiting.stage is Stage.WAITING and waiting not in stalled:
                    waiting.stalled_since_s = None  # it lacked pages once, and now a turn that a more urgent one took
        for sequence in stalled:
            self._stall(sequence, now_s)

    def _try_place(self, sequence: Sequence) -> bool:
        """False: too little is free now. One that cannot be recorded ends."""
        try:
            if not self._placer.try_place(sequence):
                return False
        except Unrecordable as error:
            self._end(sequence, failure=Failure(FailureReason.INTERNAL, str(error)))
        else:
            sequence.stage = Stage.RUNNING
            sequence.stalled_since_s = None
        return True

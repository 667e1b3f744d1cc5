"""The prefill batcher: prompts in chunks, several a step under one budget of tokens.

In order, the most urgent lane first: an urgent prompt that comes while others are half read goes first from the next
step on, and has a place at once where less urgent ones have them all. The scheduler decides the order in a lane; a
prompt waits here only for a slot and for all its pages at once, so that two prompts never hold half of what each needs.
"""

from weir.engine.batcher import Batcher, BatchLimits
from weir.engine.messages import Arrival, Failure, FailureReason, HandOffReady
from weir.engine.pages import PageNeed, PagePool
from weir.engine.placing import Placer, Unrecordable
from weir.engine.plan import ChunkPlan
from weir.engine.prompts import in_turn, is_below, note_turn
from weir.engine.rests import MAX_OVERBOOKING
from weir.engine.sequence import OpenLog, Sequence, Stage


class PrefillBatcher(Batcher):
    """Draws token 0 of each prompt, then holds slot and pages until the hand-off is settled."""

    def __init__(self, limits: BatchLimits, pool: PagePool, open_log: OpenLog) -> None:
        super().__init__(limits, pool)
        self._placer = Placer(pool, open_log)

    def add(self, arrival: Arrival) -> None:
        self._add_prompt(arrival)

    def need(self) -> PageNeed:
        """The pages of all prompts that could be placed now, were there pages."""
        pages = [sequence.num_missing_pages(sequence.num_uncomputed) for sequence in self._placeable()]
        return PageNeed(
            num_pages=sum(pages),
            num_slots=len(pages),
            head_pages=pages[0] if pages else 0,
            head_slots=1 if pages else 0,
        )

    def _plan_chunks(self, now_s: float) -> tuple[list[ChunkPlan], list[Sequence | None]]:
        self._place_waiting(now_s)
        budget = self.limits.max_num_batched_tokens
        chunks: list[ChunkPlan] = []
        owners: list[Sequence | None] = []
        served: list[Sequence] = []
        prompts = [sequence for sequence in self._ranked() if sequence.stage is Stage.RUNNING]
        for sequence in in_turn(prompts)[: self.limits.max_num_seqs]:
            if budget <= 0 or is_below(sequence, served):
                break
            chunk = sequence.plan_chunk(min(budget, self.limits.chunk_tokens))
            budget -= len(chunk.token_ids)
            chunks.append(chunk)
            owners.append(sequence)
            served.append(sequence)
        note_turn(prompts, served)
        return chunks, owners

    def _begun(self, sequence: Sequence) -> None:
        assert sequence.slot is not None, "only a placed sequence is computed"
        sequence.stage = Stage.HANDING_OFF
        self._events.append(HandOffReady(sequence.key, sequence.slot, sequence.block_table))

    def _placeable(self) -> list[Sequence]:
        """Those that wait and may be placed now. Hand-offs count: a transfer service that is away stops new prompts,
        not pages from running out. Over the places only as many as outrank somebody who is being read."""
        ranked, max_num_seqs = self._ranked(), self.limits.max_num_seqs
        waiting = [sequence for sequence in ranked if sequence.stage is Stage.WAITING]
        num_placed = len(ranked) - len(waiting)
        num_free = max(0, max_num_seqs - num_placed)
        placeable = waiting[:num_free]
        read = [sequence.facts.lane_priority for sequence in ranked if sequence.stage is Stage.RUNNING]
        num_over = max(0, num_placed - max_num_seqs)
        for sequence in waiting[num_free:]:
            num_lower = sum(lane_priority < sequence.facts.lane_priority for lane_priority in read)
            if num_over >= min(num_lower, (MAX_OVERBOOKING - 1) * max_num_seqs):
                break
            placeable.append(sequence)
            num_over += 1
        return placeable

    def _place_waiting(self, now_s: float) -> None:
        placeable = self._placeable()
        if self._may_be_overdue:
            for waiting in self._ranked():
                if waiting.stage is Stage.WAITING and waiting not in placeable:
                    waiting.stalled_since_s = None  # it lacked pages once, and now a place that a more urgent one took
        for index, sequence in enumerate(placeable):
            if not self._try_place(sequence):
                for stalled in placeable[index:]:
                    self._stall(stalled, now_s)
                return

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

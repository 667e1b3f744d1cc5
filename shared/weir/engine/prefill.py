"""The prefill batcher: prompts in chunks, several a step under one budget of tokens, in the order they were started.

The scheduler decides the order; a prompt waits here only for a slot and for all its pages at once, so that two prompts
never hold half of what each needs.
"""

from collections.abc import Iterator

from weir.engine.batcher import Batcher, BatchLimits
from weir.engine.messages import Arrival, Failure, FailureReason, HandOffReady
from weir.engine.pages import PageNeed, PagePool
from weir.engine.placing import Placer, Unrecordable
from weir.engine.plan import ChunkPlan
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
        waiting = self._waiting()[: self._num_places()]
        pages = [sequence.num_missing_pages(sequence.num_uncomputed) for sequence in waiting]
        return PageNeed(
            num_pages=sum(pages),
            num_slots=len(pages),
            head_pages=pages[0] if pages else 0,
            head_slots=1 if pages else 0,
        )

    def _plan_chunks(self, now_s: float) -> Iterator[ChunkPlan]:
        self._place_waiting(now_s)
        budget = self.limits.max_num_batched_tokens
        for sequence in self._sequences.values():
            if budget > 0 and sequence.stage is Stage.RUNNING:
                chunk = sequence.plan_chunk(min(budget, self.limits.chunk_tokens))
                budget -= len(chunk.token_ids)
                self._planned[chunk.slot] = sequence
                yield chunk

    def _go_on(self, sequence: Sequence) -> None:
        assert sequence.slot is not None, "only a placed sequence is computed"
        sequence.stage = Stage.HANDING_OFF
        self._events.append(HandOffReady(sequence.key, sequence.slot, sequence.block_table))

    def _waiting(self) -> list[Sequence]:
        return [sequence for sequence in self._sequences.values() if sequence.stage is Stage.WAITING]

    def _num_places(self) -> int:
        """Hand-offs count: a transfer service that is away stops new prompts, not pages from running out."""
        num_placed = sum(sequence.stage is not Stage.WAITING for sequence in self._sequences.values())
        return max(0, self.limits.max_num_seqs - num_placed)

    def _place_waiting(self, now_s: float) -> None:
        waiting, num_places = self._waiting(), self._num_places()
        for index, sequence in enumerate(waiting):
            if index >= num_places:
                return
            if not self._try_place(sequence):
                for stalled in waiting[index:num_places]:
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

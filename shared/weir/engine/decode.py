"""The decode batcher: continuous batching. Every step, what has ended is gone and what waits joins, in order.

A sequence that needs a page which the pool does not have sits a step out, and the pool asks for pages.
"""

from collections.abc import Iterator

from weir.engine.batcher import Batcher
from weir.engine.messages import Arrival, Failure, FailureReason, TakenOver
from weir.engine.pages import PageNeed
from weir.engine.plan import ChunkPlan
from weir.engine.sequence import Sequence, Stage

LOOKAHEAD_TOKENS = 8
"""Pages are wanted this many tokens before they are needed, so that the arena's answer is here in time."""


class DecodeBatcher(Batcher):
    """Takes in handed-off sequences and draws their tokens until they end."""

    def add(self, arrival: Arrival) -> None:
        sequence = Sequence.of_arrival(arrival)
        if arrival.slot is None or arrival.log is None:
            raise ValueError(f"{sequence.key.request_id}: a handed-off sequence comes with its slot and record")
        known = self._sequences.get(sequence.key)
        if known is not None and known.slot == arrival.slot:
            return
        self.pool.adopt(arrival.slot, arrival.block_table)
        if known is not None:  # the same attempt in a second slot: the first one counts
            arrival.log.clear()
            self.pool.put_back(arrival.slot, arrival.block_table)
            return
        self._sequences[sequence.key] = sequence
        self._take_over(sequence)

    def need(self) -> PageNeed:
        """The pages that running sequences will want within the next tokens; those that want one now come first."""
        now = soon = 0
        for sequence in self._sequences.values():
            if sequence.stage is Stage.RUNNING:
                num_unused = sequence.facts.num_booked_pages - len(sequence.block_table)
                soon += min(num_unused, sequence.num_missing_pages(sequence.num_uncomputed + LOOKAHEAD_TOKENS))
                now += min(num_unused, sequence.num_missing_pages(sequence.num_uncomputed))
        return PageNeed(num_pages=soon, num_slots=0, head_pages=now, head_slots=0)

    def _plan_chunks(self, now_s: float) -> Iterator[ChunkPlan]:
        self._join_waiting()
        budget = self.limits.max_num_batched_tokens
        for sequence in list(self._sequences.values()):
            if sequence.stage is not Stage.RUNNING or budget <= 0:
                continue
            num_tokens = min(sequence.num_uncomputed, self.limits.chunk_tokens, budget)
            if self._try_grow(sequence, num_tokens, now_s):
                chunk = sequence.plan_chunk(num_tokens)
                budget -= num_tokens
                self._planned[chunk.slot] = sequence
                yield chunk

    def _go_on(self, sequence: Sequence) -> None:
        """It stays in the batch."""

    def _take_over(self, sequence: Sequence) -> None:
        self.counters.taken_over += 1
        self.counters.count_hand_off(sequence.key.request_id, sequence.block_table)
        self._events.append(TakenOver(sequence.key, sequence.block_table))
        errors = sequence.check_integrity()
        reason = sequence.end_reason(self.limits.max_context_tokens)
        if errors or sequence.num_uncomputed == 0:
            message = f"its record cannot be continued: {'; '.join(errors) or 'no token to go on from'}"
            self._end(sequence, failure=Failure(FailureReason.INTERNAL, message))
        elif reason is not None:
            self._end(sequence, reason=reason)

    def _join_waiting(self) -> None:
        """The batch is never larger than the budget of tokens, so that nobody in it starves."""
        max_running = min(self.limits.max_num_seqs, self.limits.max_num_batched_tokens)
        num_running = sum(sequence.stage is Stage.RUNNING for sequence in self._sequences.values())
        for sequence in self._sequences.values():
            if num_running >= max_running:
                return
            if sequence.stage is Stage.WAITING:
                sequence.stage = Stage.RUNNING
                num_running += 1

    def _try_grow(self, sequence: Sequence, num_tokens: int, now_s: float) -> bool:
        """Gives a sequence the pages for its next tokens. False: it cannot be computed in this step."""
        num_missing = sequence.num_missing_pages(num_tokens)
        num_booked = sequence.facts.num_booked_pages
        if len(sequence.block_table) + num_missing > num_booked:
            message = f"needs more than the {num_booked} pages that were booked for it"
            self._end(sequence, failure=Failure(FailureReason.NO_CAPACITY, message))
            return False
        page_ids = self.pool.try_take(num_missing)
        if page_ids is None:
            self._stall(sequence, now_s)
            return False
        for page_id in page_ids:
            sequence.grow(page_id)
        sequence.stalled_since_s = None
        return True

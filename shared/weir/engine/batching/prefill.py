"""The prefill batcher: prompts in chunks, several a step under one budget of tokens.

In order, the most urgent lane first: an urgent prompt that comes while others are half computed goes first from the
next step on, and is admitted at once where less urgent ones fill the batch. The scheduler decides the order in a lane.
A prompt gets a slot and all its pages at once, and not before a step gets to it: pages that hold nothing yet are few,
however small steps are.
"""

from weir.engine.batching.admission import MAX_OVERBOOKING
from weir.engine.batching.batcher import Batcher
from weir.engine.batching.prompt_share import in_turn, is_less_urgent, is_shared_out, note_turn, share_out
from weir.engine.memory.pages import PageNeed
from weir.engine.messages import Arrival, HandOffReady
from weir.engine.plan import ChunkPlan
from weir.engine.sequence import Sequence, Stage

_STEPS_AHEAD = 2
"""Pages of the prompts that the next step gets to are asked for in this one."""


class PrefillBatcher(Batcher):
    """Samples token 0 of each prompt, then holds slot and pages until the hand-off is settled."""

    def add(self, arrival: Arrival) -> None:
        self._add_prompt(arrival)

    def need(self) -> PageNeed:
        """The pages of all prompts that this step and the next one get to, were there pages."""
        num_tokens = _STEPS_AHEAD * self.pace.num_tokens
        pages = []
        candidates = self._candidates()
        if is_shared_out(self._shares, candidates):
            candidates = [sequence for sequence, _ in self._share_out(candidates, num_tokens)]
            num_tokens = len(candidates) * self.limits.chunk_tokens
        for sequence in in_turn(candidates):
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
        if is_shared_out(self._shares, candidates):
            return self._plan_shares(candidates, budget, now_s)
        self._admit(candidates, budget, now_s)
        chunks: list[ChunkPlan] = []
        owners: list[Sequence | None] = []
        served: list[Sequence] = []
        prompts = [sequence for sequence in candidates if sequence.stage is Stage.RUNNING]
        for sequence in in_turn(prompts)[: self.limits.max_num_seqs]:
            if budget <= 0 or is_less_urgent(sequence, served):
                break
            chunk = sequence.plan_chunk(min(budget, self.limits.chunk_tokens))
            budget -= len(chunk.token_ids)
            chunks.append(chunk)
            owners.append(sequence)
            served.append(sequence)
        # Inside a lane those before a prompt come to their end, so only lower lanes are counted as passed over.
        most_urgent = max((sequence.params.scheduling.lane_priority for sequence in served), default=0)
        note_turn([s for s in candidates if s.params.scheduling.lane_priority < most_urgent], served)
        self.pace.planned(num_tokens - budget)
        return chunks, owners

    def _plan_shares(
        self, candidates: list[Sequence], budget: int, now_s: float
    ) -> tuple[list[ChunkPlan], list[Sequence | None]]:
        """As `_plan_chunks`, where lanes have shares: first who is to have pages, then what those compute that do."""
        reached = [sequence for sequence, _ in self._share_out(candidates, budget)]
        self._admit(reached, len(reached) * self.limits.chunk_tokens, now_s)
        prompts = [sequence for sequence in candidates if sequence.stage is Stage.RUNNING]
        turns = self._share_out(prompts, budget)
        chunks = [sequence.plan_chunk(num_tokens) for sequence, num_tokens in turns]
        served = [sequence for sequence, _ in turns]
        note_turn(prompts, served)
        self.pace.planned(sum(len(chunk.token_ids) for chunk in chunks))
        return chunks, [*served]

    def _share_out(self, prompts: list[Sequence], num_tokens: int) -> list[tuple[Sequence, int]]:
        chunk_tokens, max_rows = self.limits.chunk_tokens, self.limits.max_num_seqs
        return share_out(self._shares, prompts, num_tokens, chunk_tokens=chunk_tokens, max_rows=max_rows)

    def _begun(self, sequence: Sequence) -> None:
        assert sequence.slot is not None, "only a sequence with a slot is computed"
        sequence.stage = Stage.HANDING_OFF
        self._events.append(HandOffReady(sequence.key, sequence.slot, sequence.block_table))

    def _candidates(self) -> list[Sequence]:
        """Prompts that are being computed, and those that may be admitted now, in order."""
        admissible = set(self._admissible())
        return [s for s in self._ranked() if s.stage is Stage.RUNNING or s in admissible]

    def _admissible(self) -> list[Sequence]:
        """Those that wait and may be admitted now. Hand-offs count against `max_num_seqs`, so that while the transfer
        service is down no new prompts take pages. Beyond it only as many as outrank a prompt that is being computed."""
        ranked, max_num_seqs = self._ranked(), self.limits.max_num_seqs
        waiting = [sequence for sequence in ranked if sequence.stage is Stage.WAITING]
        num_admitted = len(ranked) - len(waiting)
        num_free = max(0, max_num_seqs - num_admitted)
        admissible = waiting[:num_free]
        running = [sequence.params.scheduling.lane_priority for sequence in ranked if sequence.stage is Stage.RUNNING]
        num_over = max(0, num_admitted - max_num_seqs)
        for sequence in waiting[num_free:]:
            num_lower = sum(lane_priority < sequence.params.scheduling.lane_priority for lane_priority in running)
            if num_over >= min(num_lower, (MAX_OVERBOOKING - 1) * max_num_seqs):
                break
            admissible.append(sequence)
            num_over += 1
        if self._shares:
            admissible += self._owed(waiting, {*running, *map(_lane_priority, admissible)}, num_admitted + num_over)
        return admissible

    def _owed(self, waiting: list[Sequence], present: set[int], num_admitted: int) -> list[Sequence]:
        """The first of each lane that has a share and nobody that is computed, where others fill the batch."""
        owed: list[Sequence] = []
        for sequence in waiting:
            lane_priority = _lane_priority(sequence)
            if lane_priority in self._shares.by_lane and lane_priority not in present:
                if num_admitted + len(owed) >= MAX_OVERBOOKING * self.limits.max_num_seqs:
                    break
                present.add(lane_priority)
                owed.append(sequence)
        return owed

    def _admit(self, candidates: list[Sequence], num_tokens: int, now_s: float) -> None:
        """Those that the next `num_tokens` get to. Only a more urgent one overtakes one that lacks pages."""
        stalled: list[Sequence] = []
        for sequence in in_turn(candidates):
            if num_tokens <= 0:
                break
            if sequence.stage is Stage.WAITING:
                lane_priority = sequence.params.scheduling.lane_priority
                is_behind = any(s.params.scheduling.lane_priority >= lane_priority for s in stalled)
                if is_behind or not self._try_allocate(sequence):
                    stalled.append(sequence)
                    continue
                if sequence.slot is None:  # no record can hold it: it has ended
                    continue
                sequence.stage = Stage.RUNNING
                sequence.stalled_since_s = None
            num_tokens -= min(sequence.num_uncomputed, self.limits.chunk_tokens)
        if self._may_be_overdue:
            for waiting in self._ranked():
                if waiting.stage is Stage.WAITING and waiting not in stalled:
                    waiting.stalled_since_s = None  # it lacked pages once; now a more urgent one is before it
        for sequence in stalled:
            self._stall(sequence, now_s)


def _lane_priority(sequence: Sequence) -> int:
    return sequence.params.scheduling.lane_priority

"""The prefill batcher: prompts in chunks, several a step under one budget of tokens.

In order, the most urgent lane first: an urgent prompt that comes while others are half computed goes first from the
next step on, and is admitted at once where less urgent ones fill the batch. The scheduler decides the order in a lane.
A prompt gets a slot when a step gets to it, and the pages of each chunk when that is planned: pages that hold nothing
yet are few, however small steps are. Where pages run short, half-read prompts give way (`giving_way`).
"""

from weir.engine.batching.admission import MAX_OVERBOOKING
from weir.engine.batching.batcher import Batcher, BatchLimits
from weir.engine.batching.prompt_share import in_turn, is_less_urgent, is_shared_out, note_turn, share_out
from weir.engine.memory.giving_way import GivingWay
from weir.engine.memory.pages import PageNeed, PagePool
from weir.engine.messages import Arrival, HandOffReady, PageBundle
from weir.engine.plan import ChunkPlan
from weir.engine.sequence import OpenLog, Sequence, Stage

_STEPS_AHEAD = 2
"""Pages of the prompts that the next step gets to are asked for in this one."""


class PrefillBatcher(Batcher):
    """Samples token 0 of each prompt, then holds slot and pages until the hand-off is settled."""

    def __init__(self, limits: BatchLimits, pool: PagePool, open_log: OpenLog) -> None:
        super().__init__(limits, pool, open_log)
        self._giving_way = GivingWay(pool, self.counters)

    def add(self, arrival: Arrival) -> None:
        self._add_prompt(arrival)

    def need(self) -> PageNeed:
        """What the prompts lack that this step and the next one get to; what the first of them lacks to go on."""
        num_slots = num_pages = 0
        head: tuple[int, int] | None = None
        for sequence, num_tokens in self._reached(_STEPS_AHEAD * self.pace.num_tokens):
            is_waiting = sequence.stage is Stage.WAITING
            num_lacking = sequence.num_pages_short_of_chunk(min(num_tokens, self._chunk_tokens))
            if head is None and (is_waiting or num_lacking):
                head = num_lacking, int(is_waiting)
            num_pages += sequence.num_pages_short_of_chunk(num_tokens)
            num_slots += is_waiting
        head_pages, head_slots = head or (0, 0)
        return PageNeed(num_pages=num_pages, num_slots=num_slots, head_pages=head_pages, head_slots=head_slots)

    def take_surplus(self) -> PageBundle:
        """While nothing goes on, pages kept for prompts that lack others may be what another worker needs."""
        is_any_stalled = False
        for sequence in self._ranked():
            if sequence.stage is Stage.RUNNING and sequence.stalled_since_s is None:
                return super().take_surplus()
            is_any_stalled |= sequence.stalled_since_s is not None
        if not is_any_stalled:
            return super().take_surplus()
        return self.pool.take_surplus(PageNeed(num_pages=0, num_slots=0, head_pages=0, head_slots=0))

    @property
    def next_deadline_s(self) -> float | None:
        """When `decide` has something to do although nothing has happened."""
        deadline_s = super().next_deadline_s
        if deadline_s is None or self._stall_clock.is_stopped:
            return deadline_s
        way_s = self._giving_way.next_deadline_s(self._ranked(), self._chunk_tokens, self._decided_at_s)
        return deadline_s if way_s is None else min(deadline_s, way_s)

    @property
    def _chunk_tokens(self) -> int:
        """Of one prompt in a step, at most."""
        return min(self.limits.chunk_tokens, self.pace.num_tokens)

    def _reached(self, num_tokens: int) -> list[tuple[Sequence, int]]:
        """Whom the next `num_tokens` get to, were there pages, and with how many of them."""
        candidates = self._candidates()
        if is_shared_out(self._shares, candidates):
            return self._share_out(candidates, num_tokens)
        reached = []
        for sequence in in_turn(candidates):
            if num_tokens <= 0:
                break
            num_its_own = min(sequence.num_uncomputed, _STEPS_AHEAD * self.limits.chunk_tokens, num_tokens)
            num_tokens -= num_its_own
            reached.append((sequence, num_its_own))
        return reached

    def _plan_chunks(self, now_s: float) -> tuple[list[ChunkPlan], list[Sequence | None]]:
        if self._may_be_overdue and not self._stall_clock.is_stopped:
            self._giving_way.make_way(self._ranked(), self._chunk_tokens, now_s)
        candidates = self._candidates()
        if is_shared_out(self._shares, candidates):
            return self._plan_shares(candidates, now_s)
        num_tokens = budget = self.pace.num_tokens
        chunks: list[ChunkPlan] = []
        served: list[Sequence] = []
        lacking: list[Sequence] = []
        for sequence in in_turn(candidates):
            is_full = budget <= 0 or len(served) >= self.limits.max_num_seqs
            if is_full or is_less_urgent(sequence, served):
                break
            num_its_own = min(sequence.num_uncomputed, self.limits.chunk_tokens, budget)
            if not self._try_supply(sequence, num_its_own, lacking):
                continue
            chunk = sequence.plan_chunk(num_its_own)
            budget -= len(chunk.token_ids)
            chunks.append(chunk)
            served.append(sequence)
        self._note_lacking(lacking, now_s)
        # Inside a lane those before a prompt come to their end, so only lower lanes are counted as passed over.
        most_urgent = max(map(_lane_priority, served), default=0)
        note_turn([sequence for sequence in candidates if _lane_priority(sequence) < most_urgent], served)
        self.pace.planned(num_tokens - budget)
        return chunks, [*served]

    def _plan_shares(self, candidates: list[Sequence], now_s: float) -> tuple[list[ChunkPlan], list[Sequence | None]]:
        """As `_plan_chunks`, where lanes have shares: what those cannot use that lack pages goes to the others."""
        budget = self.pace.num_tokens
        lacking: list[Sequence] = []
        able = candidates
        while True:
            turns = self._share_out(able, budget)
            unable = {sequence for sequence, num_tokens in turns if not self._try_supply(sequence, num_tokens, lacking)}
            if not unable:
                break
            able = [sequence for sequence in able if sequence not in unable]
        self._note_lacking(lacking, now_s)
        chunks = [sequence.plan_chunk(num_tokens) for sequence, num_tokens in turns]
        served = [sequence for sequence, _ in turns]
        note_turn([sequence for sequence in candidates if sequence.stage is Stage.RUNNING], served)
        self.pace.planned(sum(len(chunk.token_ids) for chunk in chunks))
        return chunks, [*served]

    def _share_out(self, prompts: list[Sequence], num_tokens: int) -> list[tuple[Sequence, int]]:
        chunk_tokens, max_rows = self.limits.chunk_tokens, self.limits.max_num_seqs
        return share_out(self._shares, prompts, num_tokens, chunk_tokens=chunk_tokens, max_rows=max_rows)

    def _begun(self, sequence: Sequence) -> None:
        assert sequence.slot is not None, "only a sequence with a slot is computed"
        sequence.stage = Stage.HANDING_OFF
        ready = HandOffReady(sequence.key, sequence.slot, sequence.held_pages, sequence.first_page)
        self._events.append(ready)

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

    def _try_supply(self, sequence: Sequence, num_tokens: int, lacking: list[Sequence]) -> bool:
        """Gives a prompt what it lacks for its next `num_tokens`, a slot with its first ones. False: it cannot be
        computed in this step. Those behind one that lacks something take nothing either, and join `lacking`."""
        num_pages = sequence.num_pages_short_of_chunk(num_tokens)
        if sequence.slot is not None and not sequence.is_preempted and not num_pages:
            return True
        ranked = self._ranked()
        is_behind = bool(lacking) and min(map(ranked.index, lacking)) < ranked.index(sequence)
        if is_behind or not self._try_take(sequence, num_pages):
            lacking.append(sequence)
            return False
        return sequence.slot is not None  # else no record can hold it: it has ended

    def _try_take(self, sequence: Sequence, num_pages: int) -> bool:
        if sequence.slot is None:
            if not self._try_allocate(sequence, num_pages):
                return False
            sequence.stage = Stage.RUNNING
            return True
        page_ids = self.pool.try_take(num_pages)
        if page_ids is None:
            return False
        if sequence.is_preempted:
            sequence.restore(page_ids, is_intact=False)
            return True
        for page_id in page_ids:
            sequence.grow(page_id)
        return True

    def _note_lacking(self, lacking: list[Sequence], now_s: float) -> None:
        if self._may_be_overdue:
            for sequence in self._ranked():
                if sequence not in lacking:
                    sequence.stalled_since_s = None  # it lacked pages once; now it has them, or others are before it
        for sequence in lacking:
            self._stall(sequence, now_s)


def _lane_priority(sequence: Sequence) -> int:
    return sequence.params.scheduling.lane_priority

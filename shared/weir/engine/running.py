"""The running batch: sequences that draw a token each step, joined by a rule and bounded in tokens, places and pages.

A step decodes first; what is left of its budget goes to sequences with more to compute: prompts (`local`), and what
preemption has lost. A sequence that needs a page which the pool does not have sits out, and the pool asks for pages;
when none come, sequences behind it give theirs up.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field

from weir.engine.batcher import Batcher, BatchLimits
from weir.engine.held_rows import HeldRows
from weir.engine.join import JoinSettings, make_join_rule
from weir.engine.messages import Arrival, EndReason, Failure, FailureReason, PageLot, TakenOver
from weir.engine.pages import PageNeed, PagePool
from weir.engine.plan import ChunkPlan, StepResult, SwapPlan
from weir.engine.preemption import Preemption, PreemptionSettings
from weir.engine.sequence import Sequence, Stage
from weir.kv.geometry import PAGE_TOKENS, num_pages_for

LOOKAHEAD_TOKENS = 8
"""Pages are wanted this many tokens before they are needed, so that the arena's answer is here in time."""


@dataclass(frozen=True, slots=True)
class RunningSettings:
    """How sequences join, and what happens when there are too few pages for those that have."""

    join: JoinSettings = field(default_factory=JoinSettings)
    preemption: PreemptionSettings = field(default_factory=PreemptionSettings)


class RunningBatcher(Batcher):
    """A sequence is in the batch while its stage is RUNNING, also while preemption has its pages away."""

    def __init__(self, limits: BatchLimits, pool: PagePool, settings: RunningSettings) -> None:
        super().__init__(limits, pool)
        # Never more than the budget of tokens, so that nobody in the batch starves.
        self._max_running = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        self._rule = make_join_rule(settings.join, self._max_running)
        self._holds_rows = settings.join.holds_rows
        self._held = HeldRows(pool)
        self._preempt_after_s = settings.preemption.after_s
        self._preemption = Preemption(pool, settings.preemption, self.counters)

    @abstractmethod
    def _try_admit(self, sequence: Sequence) -> bool:
        """What it takes for a waiting sequence to join. False: there are too few pages or slots now."""

    @abstractmethod
    def _need_of_waiting(self) -> list[tuple[int, int]]:
        """(pages, slots) of each waiting sequence that could join now, in order."""

    def need(self) -> PageNeed:
        """The pages that running sequences will want within the next tokens, then what was preempted, then what waits;
        those that want one now come first."""
        now = soon = 0
        away = []
        for sequence in self._ranked():
            if sequence.stage is Stage.RUNNING and sequence.is_away:
                away.append((self._num_missing(sequence, 0), 0))
            elif sequence.stage is Stage.RUNNING:
                soon += self._num_missing(sequence, LOOKAHEAD_TOKENS)
                now += self._num_missing(sequence, 0)
        others = [*away, *self._need_of_waiting()]
        head_pages, head_slots = (now, 0) if now or not others else others[0]
        return PageNeed(
            num_pages=soon + sum(pages for pages, _ in others),
            num_slots=sum(slots for _, slots in others),
            head_pages=head_pages,
            head_slots=head_slots,
        )

    def take_surplus(self) -> PageLot:
        """While nothing can run, what preempted sequences wait for may be what another worker of the host needs."""
        batch = self._in_batch()
        if batch and all(s.is_away or s.stalled_since_s is not None for s in batch):
            return self.pool.take_surplus(PageNeed(num_pages=0, num_slots=0, head_pages=0, head_slots=0))
        return super().take_surplus()

    @property
    def next_deadline_s(self) -> float | None:
        """When `decide` has something to do although nothing has happened."""
        waits = [s.away_since_s if s.is_away else s.stalled_since_s for s in self._in_batch()]
        rooms = [since_s + self._preempt_after_s for since_s in waits if since_s is not None]
        deadlines = [room_s for room_s in rooms if room_s > self._decided_at_s]
        deadlines += [at_s for at_s in (super().next_deadline_s, self._rule.next_deadline_s) if at_s is not None]
        return min(deadlines, default=None)

    def check_integrity(self) -> tuple[str, ...]:
        return (*super().check_integrity(), *self._preemption.check_integrity(self._sequences.values()))

    def _plan_chunks(self, now_s: float) -> Iterator[ChunkPlan]:
        ranked = self._ranked()
        self._make_room(ranked, now_s)
        self._bring_back(ranked, now_s)
        self._join_waiting(ranked, now_s)
        yield from self._plan_running(ranked, now_s)

    def _go_on(self, sequence: Sequence) -> None:
        """It stays in the batch."""

    def _take_swap_plan(self) -> SwapPlan | None:
        return self._preemption.take_plan()

    def _record_swap(self, result: StepResult) -> None:
        self._preemption.settle(result.failed_places, self._decided_at_s)

    def _undo_swap(self) -> None:
        self._preemption.undo()

    def _held_lot(self) -> PageLot:
        return self._held.lot

    def _free(self, sequence: Sequence, reason: EndReason | None) -> None:
        self._preemption.forget(sequence)
        is_row = self._holds_rows and sequence.stage is Stage.RUNNING and not sequence.is_away
        if is_row and reason in (EndReason.STOP, EndReason.LENGTH):
            self._held.add(sequence)
        else:
            super()._free(sequence, reason)
        if not self._in_batch():
            self._held.release()

    def _in_batch(self) -> list[Sequence]:
        return [sequence for sequence in self._sequences.values() if sequence.stage is Stage.RUNNING]

    def _add_handed_off(self, arrival: Arrival) -> None:
        """Takes a sequence over with its slot, record and pages."""
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

    def _make_room(self, ranked: list[Sequence], now_s: float) -> None:
        """For the first that has waited long enough, and for no other in this step: copies take its time.

        Those behind it give way, the last first. With nobody behind it, it gives way itself: those ahead go on.
        """
        num_free = self.pool.num_free_pages
        for index, sequence in enumerate(ranked):
            num_wanted = self._num_waited_for(sequence, now_s)
            if num_wanted <= num_free:
                num_free -= num_wanted
                continue
            if self._held.release():
                return
            victims = self._preemption.choose(reversed(ranked[index + 1 :]), num_wanted - num_free)
            if not victims and not sequence.is_away:
                victims = self._preemption.choose([sequence], 1)
            for victim in victims:
                victim.stalled_since_s = None
                self._preemption.plan_out(victim)
            return

    def _num_waited_for(self, sequence: Sequence, now_s: float) -> int:
        """Pages that it lacks to go on, once it has waited long enough for them."""
        since_s = sequence.away_since_s if sequence.is_away else sequence.stalled_since_s
        if sequence.stage is not Stage.RUNNING or since_s is None or now_s < since_s + self._preempt_after_s:
            return 0
        return self._num_missing(sequence, 0)

    def _bring_back(self, ranked: list[Sequence], now_s: float) -> None:
        """In order, and none past one that still has to wait. Pages that others will want at once are not for it.

        It waits as long as the batch goes on, for that will leave pages; with nobody to go on it stalls as others do.
        """
        present = [s for s in self._in_batch() if not s.is_away]
        is_going_on = any(s.stalled_since_s is None for s in present)
        num_places = self._max_running - len(present)
        num_growing = self._num_growing()
        may_come = True
        for sequence in ranked:
            if sequence.stage is not Stage.RUNNING or not sequence.is_away:
                continue
            num_missing = self._num_missing(sequence, 0)
            may_come = may_come and num_places > 0 and num_missing + num_growing <= self.pool.num_free_pages
            if may_come:
                page_ids = self.pool.try_take(num_missing)
                assert page_ids is not None, "counted above"
                self._preemption.plan_in(sequence, page_ids)
                num_places -= 1
            if may_come or is_going_on:
                sequence.stalled_since_s = None
            else:
                self._stall(sequence, now_s)

    def _join_waiting(self, ranked: list[Sequence], now_s: float) -> None:
        """As many as the rule lets in, in order: nobody overtakes a preempted sequence, or one that lacks pages."""
        num_waiting = sum(sequence.stage is Stage.WAITING for sequence in ranked)
        num_joining = self._rule.num_joining(now_s, num_waiting, len(ranked) - num_waiting)
        is_short = False
        for sequence in ranked:
            if sequence.stage is Stage.RUNNING:
                if sequence.is_away:
                    num_joining = 0
            elif num_joining <= 0:
                sequence.stalled_since_s = None
            elif is_short or not self._try_admit(sequence):
                is_short = True
                num_joining -= 1
                self._stall(sequence, now_s)
            else:
                num_joining -= 1
                sequence.stage = Stage.RUNNING  # also of one that could not be recorded, and has ended
                sequence.stalled_since_s = None

    def _plan_running(self, ranked: list[Sequence], now_s: float) -> Iterator[ChunkPlan]:
        present = [s for s in ranked if s.stage is Stage.RUNNING and not s.is_away]
        decodes = [s for s in present if s.num_uncomputed == 1]
        budget = self.limits.max_num_batched_tokens - len(self._held)
        yield from self._held.chunks()
        for sequence in [*decodes, *(s for s in present if s.num_uncomputed > 1)]:
            if budget <= 0:
                return
            num_tokens = min(sequence.num_uncomputed, self.limits.chunk_tokens, budget)
            if not self._preemption.is_leaving(sequence) and self._try_grow(sequence, num_tokens, now_s):
                chunk = sequence.plan_chunk(num_tokens)
                budget -= num_tokens
                self._planned[chunk.slot] = sequence
                yield chunk

    def _try_grow(self, sequence: Sequence, num_tokens: int, now_s: float) -> bool:
        """Gives a sequence the pages for its next tokens. False: it cannot be computed in this step."""
        num_missing = sequence.num_missing_pages(num_tokens)
        num_booked = sequence.facts.num_booked_pages
        if len(sequence.block_table) + num_missing > num_booked:
            message = f"needs more than the {num_booked} pages that were booked for it"
            self._end(sequence, failure=Failure(FailureReason.NO_CAPACITY, message))
            return False
        page_ids = self.pool.try_take(num_missing) if num_missing else ()
        if page_ids is None:
            self._stall(sequence, now_s)
            return False
        for page_id in page_ids:
            sequence.grow(page_id)
        sequence.stalled_since_s = None
        return True

    def _num_growing(self) -> int:
        """Pages that the batch as it is will want within the next tokens."""
        return sum(self._num_missing(s, LOOKAHEAD_TOKENS) for s in self._in_batch() if not s.is_away)

    def _num_missing(self, sequence: Sequence, num_ahead: int) -> int:
        """Pages that it lacks for all its tokens and `num_ahead` more, as far as they are booked."""
        num_pages = len(sequence.block_table)
        num_wanted = sequence.num_tokens + num_ahead
        if num_wanted <= num_pages * PAGE_TOKENS:  # nearly always, and this runs often
            return 0
        return max(0, min(sequence.facts.num_booked_pages, num_pages_for(num_wanted)) - num_pages)

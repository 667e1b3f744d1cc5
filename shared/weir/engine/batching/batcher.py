"""What all batchers share: the sequences of a worker, their pages, and how they end.

        add                 decide / record                 settled by the shell
    ──> WAITING ──────────> RUNNING ──────────────────────> HANDING_OFF ──────> forgotten (committed)
           └───────────────────┴── ended: finished, cancelled, failed ──┘ (refused)
                                          └──> kept, without pages, until clients know (`kept_ends`)

    WAITING or RUNNING, begun ── hand_over ──> HANDING_OFF ── take_back (nobody takes it) ──> as it was

Order is by lane, the most urgent first, and in a lane that of `add`. Every sequence ends in exactly one SequenceEnded
or SequenceForgotten.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace

from weir.core.cost import StepCost
from weir.core.life import FinishReason
from weir.engine.batching.prompt_share import StepPace
from weir.engine.batching.stall_clock import StallClock
from weir.engine.batching.step_shares import NO_SHARES, StepShares
from weir.engine.counters import EngineCounters
from weir.engine.memory.held_pages import count_load, give_back_behind, put_back_all
from weir.engine.memory.kept_ends import KeptEnds
from weir.engine.memory.pages import PageNeed, PagePool
from weir.engine.messages import (
    Arrival,
    EngineLoad,
    Event,
    Failure,
    FailureReason,
    PageBundle,
    PagesWanted,
    SequenceEnded,
    SequenceForgotten,
    SequenceKey,
    SetBounds,
)
from weir.engine.plan import NO_SWAP, ChunkPlan, StepPlan, StepResult, SwapPlan
from weir.engine.recording import Recorder, StepsInFlight, check_result
from weir.engine.sequence import OpenLog, Sequence, Stage
from weir.policy.seams import Policy


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Bounds of a step, and of waiting for a page or slot."""

    max_num_seqs: int
    max_num_batched_tokens: int
    chunk_tokens: int
    """Prompt tokens of one sequence in one step."""
    max_context_tokens: int
    vocab_size: int
    max_stall_s: float = 5.0
    """A sequence that waits longer than this for a page or slot fails."""
    target_step_s: float = math.inf
    """Steps get so many prompt tokens that they last about this long."""
    window: int | None = None
    """No layer of the model sees more than so many positions, a query's own among them; None: some see all."""
    max_kept_ends: int = 0
    """Slots at most whose sequences ended by themselves and are kept until clients know; 0: none is kept."""


_SLOT_WAIT_S = 0.05
"""So long a sequence waits for a slot of the arena before an end that is kept makes room."""


class Batcher(ABC):
    """Belongs to one engine thread. Everything that happens is an event; `take_events` hands them over, in order."""

    def __init__(self, limits: BatchLimits, pool: PagePool, open_log: OpenLog) -> None:
        """`open_log`: the empty record of a slot."""
        self.limits = limits
        self.pool = pool
        self.kept_ends = KeptEnds(pool, limits.max_kept_ends)
        self.counters = EngineCounters()
        self._open_log = open_log
        self._sequences: dict[SequenceKey, Sequence] = {}
        self._events: list[Event] = []
        self._recorder = Recorder(self.counters, self._events, limits.max_context_tokens, limits.window)
        self._order: list[Sequence] | None = None  # None: it has changed
        self._steps = StepsInFlight(pool, self.counters, self._sequences)
        self._decided_at_s = 0.0
        self._may_be_overdue = False
        self._stall_clock = StallClock(limits.max_stall_s)
        self.pace = StepPace(limits.max_num_batched_tokens, limits.target_step_s)
        self._most = limits
        """As it was made: the runner has buffers for no more."""
        self._shares = NO_SHARES

    @abstractmethod
    def add(self, arrival: Arrival) -> None:
        """One that is here already is ignored."""

    @abstractmethod
    def _plan_chunks(self, now_s: float) -> tuple[list[ChunkPlan], list[Sequence | None]]:
        """Gives pages to sequences, as far as there are any. Returns the chunks of the step, and the sequence of each;
        None for a row whose sequence has ended."""

    @abstractmethod
    def need(self) -> PageNeed:
        """What sequences will take from the pool soon."""

    def _begun(self, sequence: Sequence) -> None:  # noqa: B027 - where it is decoded too, it stays in the batch
        """The first token of its output was sampled here, and it did not end the sequence."""

    def set_policy(self, policy: Policy) -> None:  # noqa: B027 - a batcher may leave nothing to policies
        """From the next step on. What came under another policy goes on under this one."""

    def set_cost(self, cost: StepCost) -> None:  # noqa: B027
        """What steps have cost of late, for policies that predict them."""

    def set_arena_silent(self, is_silent: bool, now_s: float) -> None:
        """While it leaves demand without any answer, sequences may wait for pages as long as it takes."""
        if is_silent:
            self._stall_clock.stop(now_s)
        else:
            self._stall_clock.go_on(self._sequences.values(), now_s)

    def set_bounds(self, bounds: SetBounds) -> None:
        """From the next step on, as far as the engine was made for it. Nothing that runs ends by that. Raises
        ValueError, and changes nothing then."""
        shares = StepShares.of(bounds.step_shares)
        self.limits = replace(
            self.limits,
            max_num_seqs=min(bounds.max_num_seqs, self._most.max_num_seqs),
            max_num_batched_tokens=min(bounds.max_num_batched_tokens, self._most.max_num_batched_tokens),
        )
        self.pace.set_max(self.limits.max_num_batched_tokens)
        self._shares = shares

    def cancel(self, key: SequenceKey) -> None:
        """Ends and frees a sequence. One that is being handed off is freed if the hand-off is refused."""
        sequence = self._sequences.get(key)
        if sequence is None:
            return
        if sequence.stage is Stage.HANDING_OFF:
            sequence.is_cancelled = True
        else:
            self._end(sequence, reason=FinishReason.CANCELLED)

    def fail(self, key: SequenceKey, failure: Failure) -> None:
        """Ends and frees a sequence; one that is being handed off because its hand-off was refused."""
        sequence = self._sequences.get(key)
        if sequence is None:
            return
        if sequence.is_cancelled:
            self._end(sequence, reason=FinishReason.CANCELLED)
        else:
            self._end(sequence, failure=failure)

    def fail_all(self, failure: Failure) -> None:
        """Ends every sequence but those that are being handed off: their pages may be another worker's already."""
        for sequence in list(self._sequences.values()):
            if sequence.stage is not Stage.HANDING_OFF:
                self._end(sequence, failure=failure)

    def hand_over(self, *, with_preempted: bool) -> None:  # noqa: B027 - prompts are handed off as they are computed
        """Every sequence that another worker can go on with from its record is ready to be handed over."""

    def take_back(self, key: SequenceKey) -> None:  # noqa: B027
        """Nobody took it over: it goes on here."""

    def forget(self, key: SequenceKey, *, is_adoption: bool = False) -> None:
        """The hand-off is committed: slot, pages and record are another worker's."""
        sequence = self._sequences.pop(key, None)
        if sequence is None:
            return
        assert sequence.slot is not None, "only a sequence with a slot is handed off"
        self._order = None
        self.pool.hand_over(sequence.slot, sequence.held_pages)
        if is_adoption:
            self.counters.handed_over += 1
        else:
            self.counters.handed_off += 1
            self.counters.count_hand_off(key.request_id, sequence.held_pages)
        self._events.append(SequenceForgotten(key, is_adoption))

    def note_passed_over(self, key: SequenceKey, num_steps: int) -> None:
        """A prompt that another batcher has begun got nothing there in its last `num_steps` steps."""
        sequence = self._sequences.get(key)
        if sequence is not None:
            sequence.num_passed_over = num_steps

    def decide(self, now_s: float) -> StepPlan | None:
        """The next step, or None when nothing can be computed now. Fails one sequence that has stalled too long."""
        self._decided_at_s = now_s
        chunks, owners = self._plan_chunks(now_s)
        swap = self._swap_plan()
        if self._may_be_overdue:
            self._end_latest_overdue(now_s)
        if not chunks and swap is None:
            return None
        return self._steps.begin(chunks, owners, now_s, swap or NO_SWAP)

    def decide_ahead(self, plan: StepPlan, now_s: float) -> StepPlan | None:
        """The step after `plan`, which runs (`weir.engine.batching.ahead`). None: its result has to be known first.
        Between the two only `record`, `add`, `pool.give` and `kept_ends.release` may be called."""
        return None

    def record(self, plan: StepPlan, result: StepResult, now_s: float | None = None) -> None:
        """Takes in the result of the oldest step that was decided. It ended at `now_s`; None: it took no time.

        Raises StepDefect, having changed nothing, if the result does not fit.
        """
        check_result(plan, result, self.limits.vocab_size)
        step = self._steps.end(plan)
        self._record_swap(result)
        ended_at_s = step.decided_at_s if now_s is None else now_s
        self.pace.stepped(ended_at_s - step.decided_at_s)
        sampled = self._recorder.record(plan, step, result, ended_at_s)
        give_back_behind(sampled.past_window, self.pool, self.counters)
        for sequence in sampled.begun:
            self._begun(sequence)
        for sequence, reason in sampled.ended:
            self._end(sequence, reason=reason)
        for sequence, failure in sampled.failed:
            self._end(sequence, failure=failure)

    def fail_step(self, plan: StepPlan, failure: Failure) -> None:
        """The step did not run: its sequences end, the others go on."""
        self.counters.failed_steps += 1
        self.drop_step(plan, failure)

    def drop_step(self, plan: StepPlan, failure: Failure) -> None:
        """As `fail_step`, of a step planned ahead of one that failed."""
        self._undo_swap()
        for sequence in self._steps.end(plan).owners:
            if sequence is not None and sequence.key in self._sequences and sequence.stage is Stage.RUNNING:
                self._end(sequence, failure=failure)

    def take_events(self) -> tuple[Event, ...]:
        events = tuple(self._events)
        self._events.clear()
        return events

    def wanted(self) -> PagesWanted | None:
        need = self.need()
        if self.kept_ends:  # at worst they make room: pages are not to wait for slots
            need = replace(need, head_slots=max(0, need.head_slots - len(self.kept_ends)))
        return self.pool.wanted(need)

    def take_surplus(self) -> PageBundle:
        return self.pool.take_surplus(self.need())

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    @property
    def is_idle(self) -> bool:
        return not self._sequences

    @property
    def load(self) -> EngineLoad:
        num_waiting, num_used_pages, num_filled_pages = count_load(self._sequences.values())
        return EngineLoad(
            num_running=len(self._sequences) - num_waiting,
            num_waiting=num_waiting,
            num_held_pages=self.pool.num_held_pages,
            num_free_pages=self.pool.num_free_pages,
            num_used_pages=num_used_pages,
            num_filled_pages=num_filled_pages,
            num_kept_ends=len(self.kept_ends),
            max_step_tokens=self.pace.num_tokens,
        )

    @property
    def next_deadline_s(self) -> float | None:
        """When `decide` has a stalled sequence to end, or room to make for one."""
        stalls = [s.stalled_since_s for s in self._sequences.values() if s.stalled_since_s is not None]
        if not stalls:
            return None
        deadlines_s = [min(self._stall_clock.overdue_at_s(since_s) for since_s in stalls)]
        if self.kept_ends:
            deadlines_s += [at_s for s in stalls if (at_s := s + _SLOT_WAIT_S) > self._decided_at_s]
        return min(deadlines_s)

    def check_integrity(self) -> tuple[str, ...]:
        """What is wrong with sequences and pages, in sentences; empty when all is well."""
        held = self._held_pages()
        page_ids = [page for sequence in self._sequences.values() for page in sequence.held_pages]
        slots = [sequence.slot for sequence in self._sequences.values() if sequence.slot is not None]
        errors = self.pool.check_integrity([*page_ids, *held.page_ids], [*slots, *held.slots, *self.kept_ends.slots])
        for sequence in self._sequences.values():
            errors += sequence.check_integrity()
        return tuple(errors)

    def _ranked(self) -> list[Sequence]:
        """All members in order; not to be changed."""
        if self._order is None:
            self._order = sorted(self._members(), key=self._order_of)
        return self._order

    def _members(self) -> Iterable[Sequence]:
        return self._sequences.values()

    def _order_of(self, sequence: Sequence) -> tuple[int, float]:
        """The smaller goes first; equals in the order of `add`."""
        return -sequence.params.scheduling.lane_priority, 0.0

    def _add_prompt(self, arrival: Arrival) -> None:
        """Takes a prompt with the pages of its cached prefix. One that is here already is ignored."""
        sequence = Sequence.of_arrival(arrival)
        self.pool.adopt(None, arrival.block_table)
        if sequence.key in self._sequences:
            self.pool.put_back(None, arrival.block_table)
            return
        self._insert(sequence)
        self.counters.prompt_tokens_cached += arrival.num_computed_tokens

    def _insert(self, sequence: Sequence) -> None:
        self._sequences[sequence.key] = sequence
        self._order = None

    def _try_allocate(self, sequence: Sequence, num_pages: int) -> bool:
        """A slot, pages and a published record. False: too little is free now, and nothing was taken. One that no
        record can hold ends."""
        if num_pages > self.pool.num_free_pages:
            return False
        slot = self._try_take_slot(sequence)
        if slot is None:
            return False
        page_ids = self.pool.try_take(num_pages)
        assert page_ids is not None, "counted above"
        try:
            sequence.allocate(slot, self._open_log(slot), page_ids)
        except ValueError as error:
            self.pool.put_back_unused(slot, page_ids)
            self._end(sequence, failure=Failure(FailureReason.INTERNAL, f"cannot be recorded: {error}"))
        return True

    def _try_take_slot(self, sequence: Sequence) -> int | None:
        slot, since_s = self.pool.try_take_slot(), sequence.stalled_since_s
        has_waited = since_s is not None and self._decided_at_s >= since_s + _SLOT_WAIT_S
        if slot is None and has_waited and self.kept_ends.release_oldest():
            return self.pool.try_take_slot()
        return slot

    def _swap_plan(self) -> SwapPlan | None:
        """The copies of the step being decided; None if no pages leave or come back."""
        return None

    def _record_swap(self, result: StepResult) -> None:  # noqa: B027 - not every batcher swaps
        """The copies were made."""

    def _undo_swap(self) -> None:  # noqa: B027
        """The copies were not made, or their step failed."""

    def _held_pages(self) -> PageBundle:
        """Those in use although their sequence has ended."""
        return PageBundle()

    def _holds_row_of(self, sequence: Sequence) -> bool:
        """Whether slot and pages of a sequence that ended by itself stay in use."""
        del sequence
        return False

    def _free(self, sequence: Sequence, reason: FinishReason | None) -> None:
        """Takes back what a sequence used that has ended."""
        del reason
        put_back_all(sequence, self.pool)

    def _stall(self, sequence: Sequence, now_s: float) -> None:
        self._may_be_overdue = True
        if sequence.stalled_since_s is None:
            sequence.stalled_since_s = now_s
            self.counters.stalls += 1

    def _end_latest_overdue(self, now_s: float) -> None:
        """One at a time and the latest first: what it frees may let the others go on."""
        stalled = [sequence for sequence in self._ranked() if sequence.stalled_since_s is not None]
        self._may_be_overdue = bool(stalled)
        for sequence in reversed(stalled):
            since_s = sequence.stalled_since_s
            if since_s is not None and self._stall_clock.is_overdue(since_s, now_s):
                message = f"no page or slot was free for {self.limits.max_stall_s:g} s"
                self._end(sequence, failure=Failure(FailureReason.NO_CAPACITY, message))
                return

    def _end(self, sequence: Sequence, *, reason: FinishReason | None = None, failure: Failure | None = None) -> None:
        del self._sequences[sequence.key]
        self._order = None
        by_itself = reason in (FinishReason.STOP, FinishReason.LENGTH)
        may_keep = by_itself and not self._holds_row_of(sequence)
        is_kept = reason is not None and may_keep and self.kept_ends.try_keep(sequence, reason)
        if sequence.log is not None:
            sequence.log.clear()
        sequence.is_sound = failure is None or failure.reason is not FailureReason.INTERNAL
        self._free(sequence, reason)
        self.counters.failed += failure is not None
        self.counters.cancelled += reason is FinishReason.CANCELLED
        self.counters.finished += by_itself
        waits = sequence.waits.total(sequence.num_preemptions)
        self._events.append(SequenceEnded(sequence.key, reason, failure, is_kept, waits))

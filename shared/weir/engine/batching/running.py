"""The running batch: sequences that sample a token each step, bounded in tokens, sequences and pages.

A step decodes first (`step_planner`); what is left of its budget goes to sequences with more to compute: prompts, and
what preemption has lost. A policy may decide otherwise (`followed_policy`). Who waits joins while there is room, and
others are paused for a more urgent sequence (`admission`). A sequence that needs a page which the pool does not have is
left out, and the pool asks for pages; when none come, sequences behind it give theirs up (`preemption`).
"""

from dataclasses import dataclass, field

from weir.core.cost import StepCost
from weir.core.life import FinishReason
from weir.engine.batching.admission import MAX_OVERBOOKING, BatchAdmission, BatchQueue, PauseSettings, Pausing
from weir.engine.batching.ahead import going_on, try_plan_ahead
from weir.engine.batching.batcher import Batcher, BatchLimits
from weir.engine.batching.followed_policy import FollowedPolicy
from weir.engine.batching.own_rules import HeldRows, JoinSettings, PrefillBatches, PrefillBatchSettings, make_gate
from weir.engine.batching.step_planner import StepPlanner
from weir.engine.memory.page_need import StepReach, need_of, num_growing_pages
from weir.engine.memory.pages import PageNeed, PagePool
from weir.engine.memory.preemption import Preemption, PreemptionSettings, in_batch
from weir.engine.messages import (
    Arrival,
    Failure,
    FailureReason,
    HandOffReady,
    PageBundle,
    SequenceKey,
    SetBounds,
    TakenOver,
)
from weir.engine.plan import ChunkPlan, StepPlan, StepResult, SwapPlan
from weir.engine.sequence import OpenLog, Sequence, Stage
from weir.policy.seams import Gate, Policy, StepBudget


@dataclass(frozen=True, slots=True)
class RunningSettings:
    """How sequences join, and what happens when there are too few pages, or more sequences than a step may have.

    `num_arena_pages`: what the arena has, for policies that look at its use; 0: what the pool holds is all there is.
    """

    join: JoinSettings = field(default_factory=JoinSettings)
    preemption: PreemptionSettings = field(default_factory=PreemptionSettings)
    pauses: PauseSettings = field(default_factory=PauseSettings)
    num_arena_pages: int = 0
    prefill_batches: PrefillBatchSettings | None = None
    """None: never. Not either while a policy has a gate or a step budget, nor for static batches."""


class RunningBatcher(Batcher):
    """Takes handed-off sequences, and prompts that it computes in chunks beside the decodes and then decodes itself.

    A sequence is in the batch while its stage is RUNNING, also while it is preempted. A prompt joins when there is a
    slot, and pages as far as the next step gets to it; it takes them chunk by chunk. Where nobody can be preempted, it
    takes all of them when it joins, so that no two hold half of what each needs. A handed-off sequence brings its own.
    """

    def __init__(
        self, limits: BatchLimits, pool: PagePool, open_log: OpenLog, settings: RunningSettings | None = None
    ) -> None:
        super().__init__(limits, pool, open_log)
        settings = settings or RunningSettings()
        # Never more than the budget of tokens, so that nobody in the batch starves.
        self._most_running = self._max_running = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        self._own_gate = make_gate(settings.join)
        # A batch that runs to its end pauses nobody.
        self._pausing = Pausing(settings.pauses if self._own_gate is None else PauseSettings(max_pauses=0))
        self._policy = FollowedPolicy(pool, settings.num_arena_pages, self._max_running, self.counters)
        self._admission = BatchAdmission(self._max_running, self._pausing, self._policy)
        self._prefill_batches = PrefillBatches(settings.prefill_batches) if settings.prefill_batches else None
        self._may_hold_rows = self._holds_rows = settings.join.holds_rows
        self._held = HeldRows(pool)
        self._planner = StepPlanner(limits, pool, self._held, self.pace, self._policy)
        self._preemption = Preemption(pool, self._held.release, settings.preemption, self.counters)
        self._takes_pages_whole = settings.preemption.max_preemptions == 0
        self._stages_before: dict[SequenceKey, Stage] = {}
        """Of those that are being handed over."""
        self._follow(gate=None, step_budget=None)

    def add(self, arrival: Arrival) -> None:
        if arrival.slot is not None:
            self._add_handed_off(arrival)
        else:
            self._add_prompt(arrival)

    def set_policy(self, policy: Policy) -> None:
        """A policy without a gate leaves the worker's own rule in force."""
        self._order = None
        self._pausing.goes_by_rank = policy.is_preemptive and policy.gate is None
        self._holds_rows = self._may_hold_rows and policy.gate is None
        if not self._holds_rows:
            self._held.release()
        self._follow(policy.gate, policy.step_budget)

    def set_bounds(self, bounds: SetBounds) -> None:
        """While more run than may, nobody joins; those that run go on."""
        super().set_bounds(bounds)
        limits = self._planner.limits = self.limits
        self._max_running = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        self._admission.max_running = self._policy.max_running = self._max_running
        self._planner.shares = self._shares

    def set_cost(self, cost: StepCost) -> None:
        self._policy.cost = cost

    def _follow(self, gate: Gate | None, step_budget: StepBudget | None) -> None:
        """Prefill batches are the worker's own choice, where nothing else decides."""
        is_free = gate is None and step_budget is None and self._own_gate is None
        if is_free and self._prefill_batches is not None:
            gate, step_budget = self._prefill_batches, self._prefill_batches
        self._policy.follow(gate or self._own_gate, step_budget)
        self._admission.resume_all()

    def hand_over(self, *, with_preempted: bool) -> None:
        for sequence in self._ranked():
            if sequence.slot is not None and sequence.is_begun and (with_preempted or not sequence.is_preempted):
                self._stages_before[sequence.key] = sequence.stage
                sequence.stage, sequence.stalled_since_s = Stage.HANDING_OFF, None
                sequence.publish()
                first_page = 0 if sequence.is_preempted else sequence.first_page  # as in its record
                ready = HandOffReady(sequence.key, sequence.slot, sequence.held_pages, first_page)
                self._events.append(ready)
                self._order = None

    def take_back(self, key: SequenceKey) -> None:
        sequence, stage = self._sequences.get(key), self._stages_before.pop(key, None)
        if sequence is None or stage is None:
            return
        self._order = None
        sequence.stage = stage
        if sequence.is_cancelled:
            self._end(sequence, reason=FinishReason.CANCELLED)

    def forget(self, key: SequenceKey, *, is_adoption: bool = False) -> None:
        sequence = self._sequences.get(key)
        if sequence is not None:
            self._leave_batch(sequence)
        super().forget(key, is_adoption=is_adoption)
        self._release_rows_of_ended_batch()

    def need(self) -> PageNeed:
        return need_of(self._ranked(), self._joinable, self._reach)

    def take_surplus(self) -> PageBundle:
        """While nothing can run, pages kept for preempted sequences may be what another worker of the host needs."""
        is_any = False
        for sequence in self._ranked():
            if sequence.stage is Stage.RUNNING:
                is_any = True
                if not sequence.is_preempted and sequence.stalled_since_s is None:
                    return super().take_surplus()
        if not is_any:
            return super().take_surplus()
        return self.pool.take_surplus(PageNeed(num_pages=0, num_slots=0, head_pages=0, head_slots=0))

    @property
    def next_deadline_s(self) -> float | None:
        """When `decide` has something to do although nothing has happened."""
        gate = self._policy.gate
        deadlines = (
            super().next_deadline_s,
            self._preemption.next_deadline_s(self._ranked(), self._decided_at_s),
            gate.next_deadline_s if gate is not None else None,
        )
        return min((at_s for at_s in deadlines if at_s is not None), default=None)

    def check_integrity(self) -> tuple[str, ...]:
        return (*super().check_integrity(), *self._preemption.check_integrity(self._sequences.values()))

    def record(self, plan: StepPlan, result: StepResult, now_s: float | None = None) -> None:
        super().record(plan, result, now_s)
        self._policy.stepped(0.0 if now_s is None else now_s - self._decided_at_s)

    def decide_ahead(self, plan: StepPlan, now_s: float) -> StepPlan | None:
        policy = self._policy
        if plan.swap or len(self._held) or policy.gate is not None or policy.step_budget is not None:
            return None
        decoding = going_on(plan.chunks, self._steps.owners(plan), self._ranked())
        planned = None if decoding is None else try_plan_ahead(decoding, self.pool, self.limits.max_context_tokens)
        if planned is None:
            return None
        chunks, owners = planned
        return self._steps.begin(chunks, owners, now_s, is_ahead=True)

    def _plan_chunks(self, now_s: float) -> tuple[list[ChunkPlan], list[Sequence | None]]:
        ranked, running = self._ranked(), Stage.RUNNING
        present = [
            s for s in ranked if s.stage is running and s.preempted_since_s is None and s.stalled_since_s is None
        ]
        if len(present) < len(ranked) or self._policy.gate is not None:
            self._preemption.preempt(ranked, self._reach, now_s)
            num_present = sum(s.stage is running and s.preempted_since_s is None for s in ranked)
            for sequence in self._preemption.bring_back(ranked, self._max_running - num_present, self._reach):
                self._stall(sequence, now_s)
            self._note_half_read()
            self._join_waiting(now_s)
            present = [s for s in self._ranked() if s.stage is running and s.preempted_since_s is None]
        self._note_half_read()
        draft = self._planner.plan(self._taking_part(present), now_s)
        for sequence in draft.stalled:
            self._stall(sequence, now_s)
        for sequence in draft.over_reservation:
            message = f"needs more than the {sequence.params.num_reserved_pages} pages that are reserved for it"
            self._end(sequence, failure=Failure(FailureReason.NO_CAPACITY, message))
        return draft.chunks, draft.owners

    def _swap_plan(self) -> SwapPlan | None:
        return self._preemption.swap_plan()

    def _record_swap(self, result: StepResult) -> None:
        self._preemption.settle(result.failed_swap_slots, self._decided_at_s)

    def _undo_swap(self) -> None:
        self._preemption.undo()

    def _held_pages(self) -> PageBundle:
        return self._held.bundle

    def _order_of(self, sequence: Sequence) -> tuple[int, float]:
        return self._pausing.order_of(sequence)

    def _members(self) -> list[Sequence]:
        """Not those that are being handed over: others may have their pages already."""
        return [s for s in self._sequences.values() if s.stage is not Stage.HANDING_OFF]

    def _leave_batch(self, sequence: Sequence) -> None:
        self._preemption.forget(sequence)
        self._stages_before.pop(sequence.key, None)

    def _holds_row_of(self, sequence: Sequence) -> bool:
        return self._holds_rows and sequence.stage is Stage.RUNNING and not sequence.is_preempted

    def _free(self, sequence: Sequence, reason: FinishReason | None) -> None:
        self._leave_batch(sequence)
        by_itself = reason in (FinishReason.STOP, FinishReason.LENGTH)
        prefill_batches = self._prefill_batches
        if prefill_batches is not None and self._policy.gate is prefill_batches and by_itself:
            prefill_batches.ended(sequence.num_output_tokens)
        if by_itself and self._holds_row_of(sequence):
            self._held.add(sequence)
        else:
            super()._free(sequence, reason)
        self._release_rows_of_ended_batch()

    def _release_rows_of_ended_batch(self) -> None:
        if len(self._held) and not in_batch(self._ranked()):
            self._held.release()

    def _add_handed_off(self, arrival: Arrival) -> None:
        """Takes a sequence over with its slot, record and pages."""
        sequence = Sequence.of_arrival(arrival)
        if arrival.slot is None or arrival.log is None:
            raise ValueError(f"{sequence.key.request_id}: a handed-off sequence comes with its slot and record")
        known = self._sequences.get(sequence.key)
        if (known is not None and known.slot == arrival.slot) or self.kept_ends.holds(sequence.key, arrival.slot):
            return
        self.pool.adopt(arrival.slot, sequence.held_pages)
        if known is not None:  # the same attempt in a second slot: the first one counts
            arrival.log.clear()
            self.pool.put_back(arrival.slot, sequence.held_pages)
            return
        self._insert(sequence)
        if sequence.key.attempt.adoption:
            self.counters.adopted += 1
        else:
            self.counters.taken_over += 1
            self.counters.count_hand_off(sequence.key.request_id, sequence.held_pages)
        self._events.append(TakenOver(sequence.key, sequence.held_pages))
        errors = sequence.check_integrity()
        reason = arrival.finish_reason or sequence.end_reason(self.limits.max_context_tokens)
        if errors or sequence.num_uncomputed == 0:
            message = f"its record cannot be continued: {'; '.join(errors) or 'no token to go on from'}"
            self._end(sequence, failure=Failure(FailureReason.INTERNAL, message))
        elif reason is not None:
            self._end(sequence, reason=reason)

    def _join_waiting(self, now_s: float) -> None:
        """As many as the batch has room for, and more for whom others are paused. Nobody overtakes one that lacks
        pages, but those that have their own: what they hold may be what it lacks."""
        queue = BatchQueue.of(self._ranked())
        for sequence in queue.waiting:
            if sequence.first_seen_at_s is None:
                sequence.first_seen_at_s = sequence.served_at_s = now_s
        joining = self._admission.choose(queue, now_s)
        is_short = False
        for sequence in joining:
            if sequence.slot is None and (is_short or not self._try_admit(sequence)):
                is_short = True
                self._stall(sequence, now_s)
            else:
                self._join(sequence, now_s)
        num_joined = 0 if is_short else len(joining)
        others = [s for s in queue.waiting if s.stage is Stage.WAITING and s not in joining]
        if not is_short and self._admission.num_computed(queue.batch) + num_joined >= self._max_running:
            others = self._displace(others, queue, now_s)
        for sequence in others:
            sequence.stalled_since_s = None

    def _displace(self, newcomers: list[Sequence], queue: BatchQueue, now_s: float) -> list[Sequence]:
        """The most urgent ones join, and others are paused for them. Returns those that still wait."""
        running = [sequence for sequence in reversed(queue.batch) if sequence not in self._admission.paused]
        may_join = set(queue.waiting[: queue.num_open])
        for index, newcomer in enumerate(newcomers):
            victim = self._pausing.try_choose(newcomer, running) if newcomer in may_join else None
            if victim is None or not self._may_overbook(newcomer):
                return newcomers[index:]
            if not self._try_admit(newcomer):
                self._stall(newcomer, now_s)
                return newcomers[index + 1 :]
            self._join(newcomer, now_s)
            running.remove(victim)
            self._pausing.begin(victim, now_s)
            self.counters.pauses += 1
        return []

    @property
    def _reach(self) -> StepReach:
        return StepReach(self.pace.num_tokens, self.limits.chunk_tokens, self._takes_pages_whole)

    def _note_half_read(self) -> None:
        if self._policy.gate is not None or self._policy.step_budget is not None:
            self._policy.note_half_read(self._ranked())

    def _try_admit(self, sequence: Sequence) -> bool:
        """False: too little is free now. Pages that the batch will want at once are not for newcomers, since what joins
        must not drive others out."""
        if sequence.slot is not None:
            return True
        if num_growing_pages([*in_batch(self._ranked()), sequence], self._reach) > self.pool.num_free_pages:
            return False
        num_pages = sequence.num_missing_pages(sequence.num_uncomputed) if self._takes_pages_whole else 0
        return self._try_allocate(sequence, num_pages)

    def _joinable(self) -> list[Sequence]:
        """Those that wait and could join now, were there pages."""
        queue = BatchQueue.of(self._ranked())
        num_free = max(0, self._max_running - self._admission.num_computed(queue.batch))
        joinable, running = queue.waiting[:num_free], queue.batch[::-1]
        for newcomer in queue.waiting[num_free:]:
            victim = self._pausing.try_choose(newcomer, running)
            if victim is None or not self._may_overbook(newcomer):
                break
            running.remove(victim)
            joinable.append(newcomer)
        return joinable

    def _may_overbook(self, newcomer: Sequence) -> bool:
        """What was handed off has its pages and slot already."""
        if newcomer.slot is not None:
            return True
        num_slots = sum(sequence.slot is not None for sequence in self._sequences.values())
        return num_slots < MAX_OVERBOOKING * self._max_running

    def _join(self, sequence: Sequence, now_s: float) -> None:
        if sequence.key in self._sequences:  # one that no record can hold has ended
            sequence.stage = Stage.RUNNING
            sequence.stalled_since_s = None
            first_seen_at_s, paused_since_s = sequence.first_seen_at_s, sequence.paused_since_s
            sequence.waits.joined(now_s, first_seen_at_s=first_seen_at_s, paused_since_s=paused_since_s)
            self._pausing.end(sequence, now_s)

    def _taking_part(self, present: list[Sequence]) -> list[Sequence]:
        """Of those with pages: not those that a gate pauses, or whose pages leave in this step, nor more than a step
        may have (they are more when a policy has just gone that paused some)."""
        paused = self._admission.paused
        if paused or self._preemption.is_any_leaving:
            present = [s for s in present if s not in paused and not self._preemption.is_leaving(s)]
        if len(present) + len(self._held) > self._max_running:
            self._held.release()
            return present[: self._most_running]
        return present

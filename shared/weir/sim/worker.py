"""A simulated worker: the batcher that workers run, turned as the engine's loop turns it, over modelled steps.

turn     commands taken ─> decide ─> the step takes its time ─> record ─> told ─> the next turn
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from weir.core.cost import Chunk, StepCost
from weir.engine.batcher import Batcher
from weir.engine.messages import EngineLoad, Event, PageLot, PagesWanted
from weir.engine.plan import StepPlan, StepResult
from weir.sim.call import LAST_TOKEN, TOKEN, Calls
from weir.sim.events import Timeline, ns_of_ms, ns_of_s
from weir.sim.memory import Memory

Command = Callable[[Batcher], None]


class WorkerListener(Protocol):
    """What a worker tells."""

    def on_events(self, worker: "SimWorker", events: tuple[Event, ...]) -> None: ...

    def on_pages_free(self, memory: Memory) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """`index` counts from 1; the memory knows the worker by it."""

    worker_id: str
    index: int
    owns_memory: bool
    """No other worker uses the memory, and it keeps no prefixes: all of it is in the batcher's pool."""


class SimWorker:
    """Lives from its making to `die`."""

    def __init__(
        self,
        identity: WorkerIdentity,
        batcher: Batcher,
        memory: Memory,
        cost: StepCost,
        calls: Calls,
        timeline: Timeline,
        listener: WorkerListener,
    ) -> None:
        self.worker_id = identity.worker_id
        self.index = identity.index
        self.memory = memory
        self.is_alive = True
        self.num_steps = 0
        self.busy_ns = 0
        self._owns_memory = identity.owns_memory
        self._batcher = batcher
        self._cost = cost
        self._calls = calls
        self._timeline = timeline
        self._listener = listener
        self._inbox: list[Command] = []
        self._is_stepping = False
        self._is_turning = False
        self._wake_number = 0
        if self._owns_memory:
            self._take_all_memory()

    @property
    def load(self) -> EngineLoad:
        return self._batcher.load

    @property
    def counters(self) -> dict[str, int]:
        return dict(self._batcher.counters.snapshot())

    def post(self, command: Command) -> None:
        """Done before the next step is decided."""
        if not self.is_alive:
            return
        self._inbox.append(command)
        self.wake()

    def wake(self) -> None:
        """Something may go on: at once, or after the step that runs."""
        if not self._is_stepping and not self._is_turning and self.is_alive:
            self._is_turning = True
            self._timeline.after(0, self._turn)

    def die(self) -> None:
        """All that is on it is lost."""
        self.is_alive = False
        self.memory.release_all(self.index)

    def integrity_errors(self) -> list[str]:
        """What is wrong when all requests have ended, in sentences."""
        errors = [f"{self.worker_id}: {error}" for error in self._batcher.check_integrity()]
        if not self._batcher.is_idle:
            errors.append(f"{self.worker_id}: has sequences when all requests have ended")
        return errors

    def give_memory_back(self) -> None:
        """At the end of a run."""
        self._release(self._batcher.pool.take_all_free())

    def give_back(self, slot: int, page_ids: tuple[int, ...]) -> None:
        """Was reserved for a hand-off that did not come."""
        self.memory.release(self.index, PageLot(page_ids, (slot,)), ())
        self._listener.on_pages_free(self.memory)

    def free_handed_off(self, slot: int, page_ids: tuple[int, ...]) -> None:
        """The receiver has copied them; the batcher forgets the sequence with the next turn."""
        self.memory.release(self.index, PageLot(page_ids, (slot,)), ())
        if self._owns_memory:
            self.post(lambda batcher: self._take_all_memory())
        else:
            self._listener.on_pages_free(self.memory)

    def _turn(self) -> None:
        self._is_turning = False
        if not self.is_alive or self._is_stepping:
            return
        commands, self._inbox = self._inbox, []
        for command in commands:
            command(self._batcher)
        self._supply()
        plan = self._batcher.decide(self._timeline.now_s())
        self._tell()
        if plan is None:
            self._sleep()
            return
        duration_ns = ns_of_ms(self._cost_ms(plan))
        self._is_stepping = True
        self.num_steps += 1
        self.busy_ns += duration_ns
        self._timeline.after(duration_ns, lambda: self._end_step(plan))

    def _end_step(self, plan: StepPlan) -> None:
        if not self.is_alive:
            return
        self._is_stepping = False
        self._batcher.record(plan, self._draw(plan))
        self._tell()
        self._turn()

    def _tell(self) -> None:
        if self._batcher.has_events:
            self._listener.on_events(self, self._batcher.take_events())
        surplus = self._batcher.pool.take_used() if self._owns_memory else self._batcher.take_surplus()
        if not surplus:
            return
        self._release(surplus)
        if self._owns_memory:
            self._take_all_memory()
        else:
            self._listener.on_pages_free(self.memory)

    def _sleep(self) -> None:
        """Until a command comes, or the batcher's deadline."""
        self._wake_number += 1
        deadline_s = self._batcher.next_deadline_s
        if deadline_s is None:
            return
        number = self._wake_number
        # One more nanosecond: the deadline as a float may lie a little behind the whole number below it.
        self._timeline.at(max(self._timeline.now_ns, ns_of_s(deadline_s)) + 1, lambda: self._wake_at_deadline(number))

    def _wake_at_deadline(self, number: int) -> None:
        if number == self._wake_number:
            self.wake()

    def _cost_ms(self, plan: StepPlan) -> float:
        """A chunk of one token is a decode, as `weir profile` counts them."""
        chunks, num_decodes, num_context_tokens = [], 0, 0
        for chunk in plan.chunks:
            num_tokens = len(chunk.token_ids)
            if num_tokens == 1:
                num_decodes += 1
                num_context_tokens += chunk.start + 1
            else:
                chunks.append(Chunk(num_tokens, chunk.start))
        return self._cost.step_ms(chunks, num_decodes, num_context_tokens)

    def _draw(self, plan: StepPlan) -> StepResult:
        token_ids = {}
        for chunk in plan.chunks:
            if chunk.sample is None:
                continue
            facts = self.memory.record(chunk.slot).facts
            # A row that a static batch holds after its end belongs to nobody.
            is_last = facts is not None and (
                chunk.sample.output_index + 1 == self._calls[facts.request_id].num_true_tokens
            )
            token_ids[chunk.slot] = LAST_TOKEN if is_last else TOKEN
        return StepResult(token_ids)

    def _supply(self) -> None:
        wanted = None if self._owns_memory else self._batcher.wanted()
        if wanted is None:
            return
        lot = self._try_acquire(wanted)
        if lot is not None:
            self._batcher.pool.give(lot)

    def _try_acquire(self, wanted: PagesWanted) -> PageLot | None:
        lot = self.memory.try_acquire(self.index, wanted.num_pages, wanted.num_slots)
        return lot or self.memory.try_acquire(self.index, wanted.least_pages, wanted.least_slots)

    def _take_all_memory(self) -> None:
        lot = self.memory.take_all(self.index)
        self._batcher.pool.give(lot)

    def _release(self, lot: PageLot) -> None:
        hashes = []
        for used in lot.used:
            call = self._calls[used.prefix_seed.decode()] if used.prefix_seed else None
            num_pages = len(used.token_ids) // 16
            hashes.append(() if call is None else call.hashes[:num_pages])
        self.memory.release(self.index, lot, hashes)

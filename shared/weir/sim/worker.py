"""A simulated worker: it drives an engine as the real loop drives its batcher, one step after the other.

turn     commands ─> decide ─> the step takes its time ─> record ─> events reported ─> the next turn
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from weir.engine.messages import Arrival, Event, Failure, PageBundle, SetBounds
from weir.kv.geometry import PAGE_TOKENS
from weir.sim.cores import SharedCores
from weir.sim.memory import SimPageMemory
from weir.sim.request_state import TOKEN, SimRequestState
from weir.sim.timeline import Timeline, ns_of_s


class SimArrival(NamedTuple):
    """As `weir.engine.messages.Arrival`, without parameters: only the real batchers ask for them."""

    state: SimRequestState
    slot: int | None = None
    """None: a prompt."""
    page_ids: tuple[int, ...] = ()
    """A prompt's are those of its cached prefix."""
    num_output_tokens: int = 0
    """Of a prompt, that an earlier dispatch has sampled."""

    def for_batcher(self, memory: SimPageMemory) -> Arrival:
        """`memory`: of the worker that takes it."""
        state, slot, page_ids, num_output_tokens = self
        params = state.params()
        if slot is None:
            num_cached_tokens = len(page_ids) * PAGE_TOKENS
            return Arrival(
                params,
                output_token_ids=(TOKEN,) * num_output_tokens,
                block_table=page_ids,
                num_computed_tokens=num_cached_tokens,
                num_shared_pages=len(page_ids),
            )
        record = memory.records[slot]
        record.begin(params)
        return Arrival(
            params,
            slot=slot,
            log=record,
            output_token_ids=(TOKEN,),
            block_table=page_ids,
            num_computed_tokens=state.request.num_prompt_tokens,
        )


class Engine(Protocol):
    """What a worker drives: the real batcher (`exact`), or its equal for steady stretches (`fast`, `fast_prefill`)."""

    @property
    def busy_ns(self) -> int: ...

    def add(self, arrival: SimArrival) -> None: ...

    def cancel(self, state: SimRequestState) -> None: ...

    def fail(self, state: SimRequestState, failure: Failure) -> None: ...

    def forget(self, state: SimRequestState, copied: PageBundle | None) -> None:
        """It is handed off; `copied`: what it had here, which is free now."""
        ...

    def set_bounds(self, bounds: SetBounds) -> None:
        """Raises ValueError where it cannot."""
        ...

    def begin_step(self) -> int | None:
        """Decides; nanoseconds that the step takes, or None: there is nothing to compute now."""
        ...

    def end_step(self) -> None:
        """The step ends now; what came out is reported."""
        ...

    @property
    def next_deadline_s(self) -> float | None: ...

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def max_step_tokens(self) -> int:
        """Prompt tokens that a step gets at most, as steps go now."""
        ...

    def counters(self) -> Mapping[str, float]: ...

    def settle_all(self) -> None:
        """Reports what every sequence has sampled so far."""
        ...

    def die(self) -> None:
        """All that is on it is lost."""
        ...

    def integrity_errors(self) -> list[str]:
        """What is wrong when all requests have ended, in sentences."""
        ...

    def give_memory_back(self) -> None:
        """At the end of a run."""
        ...


class WorkerListener(Protocol):
    """Takes what comes out of workers."""

    def on_events(self, worker: "SimWorker", events: tuple[Event, ...]) -> None: ...

    def on_pages_free(self, memory: SimPageMemory) -> None: ...

    def on_token(self, state: SimRequestState, *, is_last: bool) -> None:
        """Sampled now."""
        ...

    def on_tokens(self, state: SimRequestState, num_tokens: int, last_ns: int, longest_gap_ns: int) -> None:
        """The next of one that goes on, the last of them sampled at `last_ns`. Their gaps come by `on_gaps`."""
        ...

    def on_gaps(self, gap_ns: int, num_gaps: int) -> None:
        """Between the tokens of so many sequences."""
        ...


Command = Callable[[Engine], None]


class SimWorker:
    """Lives from its making to `die`, and needs an engine to drive before it is posted to. `index` counts from 1; its
    memory knows it by that."""

    def __init__(
        self,
        worker_id: str,
        index: int,
        memory: SimPageMemory,
        timeline: Timeline,
        cores: SharedCores | None = None,
        contention: float = 0.0,
    ) -> None:
        """`cores`: those that it shares with others; None: each step takes what it takes alone."""
        self.worker_id = worker_id
        self.index = index
        self.memory = memory
        self.is_alive = True
        self.engines: list[Engine] = []
        """It drives the last one; those before it keep what they have counted."""
        self._timeline = timeline
        self._cores = cores
        self._contention = contention
        self._slowed_ns = 0
        self._inbox: list[Command] = []
        self._is_stepping = False
        self._is_turning = False
        self._wake_number = 0

    @property
    def engine(self) -> Engine:
        return self.engines[-1]

    @property
    def busy_ns(self) -> int:
        """Of all steps that were begun; by what others slowed them down it is longer once they have ended."""
        return sum(engine.busy_ns for engine in self.engines) + self._slowed_ns

    @property
    def is_idle(self) -> bool:
        """It has nothing, and nothing has been posted."""
        num_sequences = self.engine.num_running + self.engine.num_waiting
        return not (num_sequences or self._inbox or self._is_stepping or self._is_turning)

    def drive(self, engine: Engine) -> None:
        """From here on."""
        self.engines.append(engine)

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
        self.engine.die()
        if self._cores is not None:
            self._cores.drop(self.worker_id)
        self.memory.release_all(self.index)

    def _turn(self) -> None:
        self._is_turning = False
        if not self.is_alive or self._is_stepping:
            return
        self._wake_number += 1
        if self._inbox:
            commands, self._inbox = self._inbox, []
            for command in commands:
                command(self.engine)
        duration_ns = self.engine.begin_step()
        if duration_ns is None:
            self._sleep()
            return
        self._is_stepping = True
        if self._cores is None:
            self._timeline.after(duration_ns, self._end_step)
        else:
            ends_alone_ns = self._timeline.now_ns + duration_ns
            self._cores.begin(self.worker_id, self._contention, duration_ns, lambda: self._end_slowed(ends_alone_ns))

    def _end_slowed(self, ends_alone_ns: int) -> None:
        self._slowed_ns += self._timeline.now_ns - ends_alone_ns
        self._end_step()

    def _end_step(self) -> None:
        if not self.is_alive:
            return
        self._is_stepping = False
        self.engine.end_step()
        self._turn()

    def _sleep(self) -> None:
        """Until a command comes, or the batcher's deadline."""
        deadline_s = self.engine.next_deadline_s
        if deadline_s is None:
            return
        number = self._wake_number
        # One more nanosecond: the deadline as a float may lie a little behind the whole number below it.
        self._timeline.at(max(self._timeline.now_ns, ns_of_s(deadline_s)) + 1, lambda: self._wake_at_deadline(number))

    def _wake_at_deadline(self, number: int) -> None:
        if number == self._wake_number:
            self.wake()

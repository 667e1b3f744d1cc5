"""A prefill worker whose prompts are numbers: what `PrefillBatcher` does with prompts of one lane, to the nanosecond.

Pages are counted where the worker has a memory to itself, and named where they change hands in place. Policies have no
say in a prefill worker's steps. A test runs both.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from weir.engine.messages import Failure, HandOffReady, PageBundle, SequenceEnded
from weir.kv.geometry import num_pages_for
from weir.sim.call import SimRequestState
from weir.sim.engines.step_time import step_ns
from weir.sim.events import Timeline
from weir.sim.memory.page_memory import SimPageMemory
from weir.sim.spec import PoolSpec
from weir.sim.workers.arriving import SimArrival
from weir.sim.workers.worker import SimWorker, WorkerListener

_NO_SLOT = -1
_COUNTED: tuple[str, ...] = ("steps", "prefill_steps", "prompt_tokens_computed", "tokens_generated", "handed_off")
_COUNTED += ("finished", "cancelled", "failed", "stalls")
"""Of `weir.engine.counters`, all that can rise here."""


@dataclass(slots=True, eq=False)
class FastPrompt:
    """From its coming until its hand-off is settled."""

    call: SimRequestState
    num_uncomputed: int
    num_computed: int = 0
    num_pages: int = 0
    """That it has: none, or those of all its tokens."""
    bundle: PageBundle | None = None
    """The same by name, where they have names."""
    is_stalled: bool = False
    is_cancelled: bool = False


class PromptRoom(Protocol):
    """Where prompts have their pages."""

    def try_place(self, prompt: FastPrompt, num_pages: int) -> bool: ...

    def give_back(self, prompt: FastPrompt) -> None: ...


class CountedRoom:
    """Nobody else uses the memory: how many pages are in use is all that there is to know."""

    def __init__(self, memory: SimPageMemory) -> None:
        self._num_free = memory.num_pages

    def try_place(self, prompt: FastPrompt, num_pages: int) -> bool:
        if num_pages > self._num_free:
            return False
        self._num_free -= num_pages
        prompt.num_pages = num_pages
        return True

    def give_back(self, prompt: FastPrompt) -> None:
        self._num_free += prompt.num_pages


class NamedRoom:
    """Pages change hands with their prompt."""

    def __init__(self, worker: SimWorker, listener: WorkerListener) -> None:
        self._worker = worker
        self._listener = listener

    def try_place(self, prompt: FastPrompt, num_pages: int) -> bool:
        bundle = self._worker.memory.try_acquire(self._worker.index, num_pages, 1)
        assert bundle is not None, "a memory that fast engines use says so when it is tight"
        prompt.num_pages, prompt.bundle = num_pages, bundle
        return True

    def give_back(self, prompt: FastPrompt) -> None:
        assert prompt.bundle is not None, "it was placed here"
        self._worker.memory.release(self._worker.index, prompt.bundle, ())
        self._listener.on_pages_free(self._worker.memory)


class FastPrefill:
    """Implements `weir.sim.workers.worker.Engine`."""

    def __init__(
        self, worker: SimWorker, pool: PoolSpec, room: PromptRoom, timeline: Timeline, listener: WorkerListener
    ) -> None:
        self.busy_ns = 0
        self._worker = worker
        self._cost = pool.profile.step
        self._max_num_seqs = pool.max_num_seqs
        self._max_tokens = pool.max_num_batched_tokens
        self._chunk_tokens = pool.chunk_tokens
        self._room = room
        self._timeline = timeline
        self._listener = listener
        self._prompts: dict[SimRequestState, FastPrompt] = {}
        self._waiting: deque[FastPrompt] = deque()
        self._reading: list[FastPrompt] = []
        """They have their pages."""
        self._chunks: list[tuple[FastPrompt, int]] = []
        self._has_stalls = False
        self._counts = dict.fromkeys(_COUNTED, 0)

    def add(self, arrival: SimArrival) -> None:
        prompt = FastPrompt(arrival.call, arrival.call.request.num_prompt_tokens)
        self._prompts[arrival.call] = prompt
        self._waiting.append(prompt)

    def cancel(self, call: SimRequestState) -> None:
        """What is being handed over is freed if that is refused."""
        prompt = self._prompts.get(call)
        if prompt is None:
            return
        if not prompt.num_uncomputed:
            prompt.is_cancelled = True
        else:
            self._drop(prompt)
            self._counts["cancelled"] += 1

    def fail(self, call: SimRequestState, failure: Failure) -> None:
        prompt = self._prompts.get(call)
        if prompt is None:
            return
        self._drop(prompt)
        self._counts["cancelled" if prompt.is_cancelled else "failed"] += 1
        if not prompt.is_cancelled:
            self._listener.on_events(self._worker, (SequenceEnded(call.key, None, failure),))

    def forget(self, call: SimRequestState, copied: PageBundle | None) -> None:
        prompt = self._prompts.pop(call, None)
        if prompt is None:
            return
        self._counts["handed_off"] += 1
        if copied is not None:
            self._room.give_back(prompt)

    def begin_step(self) -> int | None:
        if self._waiting:
            self._place()
        if not self._reading:
            return None
        self._chunks = self._plan()
        duration_ns = step_ns(self._cost, self._chunks)
        self._counts["steps"] += 1
        self.busy_ns += duration_ns
        return duration_ns

    def end_step(self) -> None:
        """Tokens are told first, then what is ready to be handed over."""
        counts, read = self._counts, []
        for prompt, num_tokens in self._chunks:
            prompt.num_computed += num_tokens
            prompt.num_uncomputed -= num_tokens
            counts["prompt_tokens_computed"] += num_tokens
            if not prompt.num_uncomputed:
                read.append(prompt)
        counts["prefill_steps"] += 1
        counts["tokens_generated"] += len(read)
        for prompt in read:
            self._reading.remove(prompt)
            self._listener.on_token(prompt.call, is_last=prompt.call.num_true_tokens == 1)
        going_on = [prompt for prompt in read if prompt.call.num_true_tokens > 1]
        if going_on:
            self._listener.on_events(self._worker, tuple(map(_ready, going_on)))
        for prompt in read:
            if prompt.call.num_true_tokens == 1:
                counts["finished"] += 1
                del self._prompts[prompt.call]
                self._room.give_back(prompt)

    def look_ahead(self, ends_ns: int) -> int:
        return ends_ns

    def catch_up(self) -> int:
        raise AssertionError("it never looks ahead")

    @property
    def next_deadline_s(self) -> float | None:
        return None

    @property
    def num_running(self) -> int:
        return len(self._prompts) - len(self._waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def max_step_tokens(self) -> int:
        return self._max_tokens

    def counters(self) -> Mapping[str, float]:
        return {name: float(value) for name, value in self._counts.items()}

    def settle_all(self) -> None:
        """It has told everything."""

    def die(self) -> None:
        """Nobody asks it for anything any more."""

    def integrity_errors(self) -> list[str]:
        return [f"{len(self._prompts)} prompts are here when all requests have ended"] if self._prompts else []

    def give_memory_back(self) -> None:
        """It holds nothing but what its prompts have."""

    def _place(self) -> None:
        """In order, as far as there are places and pages, and the step gets to them; hand-offs count."""
        num_tokens = self._max_tokens - sum(min(p.num_uncomputed, self._chunk_tokens) for p in self._reading)
        num_places, num_stalled = self._max_num_seqs - self.num_running, 0
        while num_tokens > 0 and num_places > 0 and self._waiting:
            prompt = self._waiting[0]
            if not self._room.try_place(prompt, num_pages_for(prompt.num_uncomputed)):
                num_stalled = num_places
                break
            self._waiting.popleft()
            self._reading.append(prompt)
            num_tokens -= min(prompt.num_uncomputed, self._chunk_tokens)
            num_places -= 1
        if num_stalled or self._has_stalls:
            for index, prompt in enumerate(self._waiting):
                self._counts["stalls"] += index < num_stalled and not prompt.is_stalled
                prompt.is_stalled = index < num_stalled
            self._has_stalls = num_stalled > 0

    def _plan(self) -> list[tuple[FastPrompt, int]]:
        """Who computes how many tokens."""
        budget, planned = self._max_tokens, []
        for prompt in self._reading[: self._max_num_seqs]:
            if budget <= 0:
                break
            num_tokens = min(prompt.num_uncomputed, self._chunk_tokens, budget)
            budget -= num_tokens
            planned.append((prompt, num_tokens))
        return planned

    def _drop(self, prompt: FastPrompt) -> None:
        del self._prompts[prompt.call]
        if prompt in self._reading:
            self._reading.remove(prompt)
        if not prompt.num_pages:
            self._waiting.remove(prompt)
        else:
            self._room.give_back(prompt)


def _ready(prompt: FastPrompt) -> HandOffReady:
    """Pages that are only counted have no names, and nobody asks for them."""
    bundle = prompt.bundle
    return HandOffReady(prompt.call.key, bundle.slots[0] if bundle else _NO_SLOT, bundle.page_ids if bundle else ())

"""A prefill worker whose prompts are numbers: what `PrefillBatcher` does with prompts of one lane, to the nanosecond.

For workers with a memory to themselves: pages are only counted, and there must be some for every chunk. Policies have
no say in a prefill worker's steps. A test runs both.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, islice

from weir.engine.messages import Failure, HandOffReady, PageBundle, SequenceEnded, SetBounds
from weir.kv.geometry import num_pages_for
from weir.sim.engines.fast_batch import step_ns
from weir.sim.memory import PlainMemory
from weir.sim.request_state import SimRequestState
from weir.sim.spec import PoolSpec
from weir.sim.worker import SimArrival, SimWorker, WorkerListener

_NO_SLOT = -1
_COUNTED: tuple[str, ...] = ("steps", "prefill_steps", "prompt_tokens_computed", "tokens_generated", "handed_off")
_COUNTED += ("finished", "cancelled", "failed")
"""Of `weir.engine.counters`, all that can rise here."""


@dataclass(slots=True, eq=False)
class FastPrompt:
    """From its coming until its hand-off is settled."""

    state: SimRequestState
    num_uncomputed: int
    num_computed: int = 0
    num_pages: int = 0
    """That it has: those of its chunks so far. None: it waits."""
    is_cancelled: bool = False


class FastPrefill:
    """Implements `weir.sim.worker.Engine`. Its memory raises MemoryIsTight when a chunk lacks pages."""

    def __init__(self, worker: SimWorker, pool: PoolSpec, memory: PlainMemory, listener: WorkerListener) -> None:
        self.busy_ns = 0
        self._worker = worker
        self._cost = pool.profile.step
        self._max_num_seqs = pool.max_num_seqs
        self._max_tokens = pool.max_num_batched_tokens
        self._chunk_tokens = pool.chunk_tokens
        self._memory = memory
        self._listener = listener
        self._prompts: dict[SimRequestState, FastPrompt] = {}
        self._waiting: deque[FastPrompt] = deque()
        self._computing: list[FastPrompt] = []
        self._chunks: list[tuple[FastPrompt, int]] = []
        self._counts = dict.fromkeys(_COUNTED, 0)

    def add(self, arrival: SimArrival) -> None:
        prompt = FastPrompt(arrival.state, arrival.state.request.num_prompt_tokens)
        self._prompts[arrival.state] = prompt
        self._waiting.append(prompt)

    def cancel(self, state: SimRequestState) -> None:
        """What is being handed over is freed if that is refused."""
        prompt = self._prompts.get(state)
        if prompt is None:
            return
        if not prompt.num_uncomputed:
            prompt.is_cancelled = True
        else:
            self._drop(prompt)
            self._counts["cancelled"] += 1

    def fail(self, state: SimRequestState, failure: Failure) -> None:
        prompt = self._prompts.get(state)
        if prompt is None:
            return
        self._drop(prompt)
        self._counts["cancelled" if prompt.is_cancelled else "failed"] += 1
        if not prompt.is_cancelled:
            self._listener.on_events(self._worker, (SequenceEnded(state.key, None, failure),))

    def forget(self, state: SimRequestState, copied: PageBundle | None) -> None:
        prompt = self._prompts.pop(state, None)
        if prompt is None:
            return
        self._counts["handed_off"] += 1
        assert copied is not None, "without a link prefill workers share their memory, and none is fast"
        self._memory.count_used(-prompt.num_pages)

    def set_bounds(self, bounds: SetBounds) -> None:
        raise ValueError(f"{bounds}: a fast engine has the bounds that it was made with")

    def begin_step(self) -> int | None:
        """Raises MemoryIsTight."""
        self._chunks = self._plan()
        if not self._chunks:
            return None
        duration_ns = step_ns(self._cost, ((prompt.num_computed, num_tokens) for prompt, num_tokens in self._chunks))
        self._counts["steps"] += 1
        self.busy_ns += duration_ns
        return duration_ns

    def end_step(self) -> None:
        """Tokens are reported first, then what is ready to be handed over."""
        counts, computed = self._counts, []
        for prompt, num_tokens in self._chunks:
            prompt.num_computed += num_tokens
            prompt.num_uncomputed -= num_tokens
            counts["prompt_tokens_computed"] += num_tokens
            if not prompt.num_uncomputed:
                computed.append(prompt)
        counts["prefill_steps"] += 1
        counts["tokens_generated"] += len(computed)
        for prompt in computed:
            self._computing.remove(prompt)
            self._listener.on_token(prompt.state, is_last=prompt.state.num_true_tokens == 1)
        going_on = [prompt for prompt in computed if prompt.state.num_true_tokens > 1]
        if going_on:
            self._listener.on_events(self._worker, tuple(map(_ready, going_on)))
        for prompt in computed:
            if prompt.state.num_true_tokens == 1:
                counts["finished"] += 1
                del self._prompts[prompt.state]
                self._memory.count_used(-prompt.num_pages)

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
        """It has reported everything."""

    def die(self) -> None:
        """Nobody asks it for anything any more."""

    def integrity_errors(self) -> list[str]:
        return [f"{len(self._prompts)} prompts are here when all requests have ended"] if self._prompts else []

    def give_memory_back(self) -> None:
        """It holds nothing but what its prompts have."""

    def _plan(self) -> list[tuple[FastPrompt, int]]:
        """Who computes how many tokens, in order: those that wait as far as there are places; hand-offs count."""
        budget = self._max_tokens
        planned: list[tuple[FastPrompt, int]] = []
        num_free_places = max(0, self._max_num_seqs - self.num_running)
        for prompt in chain(self._computing, islice(self._waiting, num_free_places)):
            if budget <= 0 or len(planned) >= self._max_num_seqs:
                break
            num_tokens = min(prompt.num_uncomputed, self._chunk_tokens, budget)
            budget -= num_tokens
            planned.append((prompt, num_tokens))
        for prompt, num_tokens in planned:
            if not prompt.num_pages:
                self._computing.append(self._waiting.popleft())
            num_pages = num_pages_for(prompt.num_computed + num_tokens)
            self._memory.count_used(num_pages - prompt.num_pages)
            prompt.num_pages = num_pages
        return planned

    def _drop(self, prompt: FastPrompt) -> None:
        del self._prompts[prompt.state]
        if prompt in self._computing:
            self._computing.remove(prompt)
        if not prompt.num_pages:
            self._waiting.remove(prompt)
        else:
            self._memory.count_used(-prompt.num_pages)


def _ready(prompt: FastPrompt) -> HandOffReady:
    """Pages that are only counted have no ids, and over a link nobody asks for them."""
    return HandOffReady(prompt.state.key, _NO_SLOT, ())

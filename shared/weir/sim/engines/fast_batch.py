"""The sequences of a fast engine: what a step computes of their prompts, and those that decode in every step."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from weir.core.cost import PromptChunk, StepCost
from weir.engine.batching.prompt_share import in_turn, note_turn
from weir.kv.geometry import PAGE_TOKENS, num_pages_for
from weir.sim.memory import PlainMemory
from weir.sim.request_state import SimRequestState
from weir.sim.timeline import ns_of_ms
from weir.sim.worker import SimArrival, WorkerListener


@dataclass(slots=True, eq=False)
class FastRow:
    """A sequence; `order` counts arrivals. While it decodes it has `context(step)` tokens in each step from
    `first_step` on."""

    state: SimRequestState
    arrival: SimArrival
    order: int
    num_prompt_tokens: int
    num_computed: int = 0
    """Of its prompt."""
    first_step: int = 0
    """In which it samples its second token; 0: it has none yet."""
    reported_step: int = 0
    """Its tokens up to the end of this step have been reported."""
    is_waiting: bool = True
    is_gone: bool = False
    is_eager: bool = False
    """Each of its tokens is reported when it is sampled."""
    is_over: bool = False
    """None of them is."""
    num_passed_over: int = 0

    @property
    def num_uncomputed(self) -> int:
        """Of its prompt."""
        return self.num_prompt_tokens - self.num_computed

    @property
    def num_prompt_pages(self) -> int:
        return num_pages_for(self.num_prompt_tokens)

    @property
    def last_step(self) -> int:
        """In which it samples its last token; the first one came from its prompt."""
        return self.first_step + self.state.num_true_tokens - 2

    @property
    def growth_phase(self) -> int:
        """It needs another page in the steps whose number has this remainder."""
        return (self.first_step - self.num_prompt_tokens) % PAGE_TOKENS

    def context(self, step: int) -> int:
        """Tokens that it has when the step begins; the last of them is computed in it."""
        return self.num_prompt_tokens + 1 + step - self.first_step

    def num_grown_pages(self, step: int) -> int:
        """Beyond those of its prompt, when the step is over."""
        return num_pages_for(self.context(step)) - self.num_prompt_pages


def plan_prompts(prompts: list[FastRow], budget: int, chunk_tokens: int) -> list[tuple[FastRow, int]]:
    """Who computes how many tokens in a step: first those that lack one token, which count as decodes."""
    if len(prompts) == 1:
        row = prompts[0]
        num_tokens = min(row.num_uncomputed, chunk_tokens, budget) if row.num_uncomputed > 1 else 1
        row.num_passed_over = 0 if num_tokens > 0 else row.num_passed_over + 1
        return [(row, num_tokens)] if num_tokens > 0 else []
    longer = [row for row in prompts if row.num_uncomputed > 1]
    planned = [(row, 1) for row in prompts if row.num_uncomputed == 1]
    budget -= len(planned)
    served = []
    for row in in_turn(longer):
        if budget <= 0:
            break
        num_tokens = min(row.num_uncomputed, chunk_tokens, budget)
        budget -= num_tokens
        planned.append((row, num_tokens))
        served.append(row)
    note_turn(longer, served)
    return planned


def step_ns(cost: StepCost, parts: Iterable[tuple[int, int]], num_decodes: int = 0, num_context_tokens: int = 0) -> int:
    """Nanoseconds of a step with these tokens of prompts beside so many decodes, which see so many tokens together.

    `parts`: (tokens of a prompt that are computed, tokens of it to compute). One token of a prompt counts as a decode.
    """
    chunks = []
    for num_before, num_tokens in parts:
        if num_tokens > 1:
            chunks.append(PromptChunk(num_tokens, num_before))
        else:
            num_decodes += 1
            num_context_tokens += num_before + 1
    return ns_of_ms(cost.step_ms(chunks, num_decodes, num_context_tokens))


class FastBatch:
    """Steps are numbered from 1. Pages that rows grow by are counted in `memory`."""

    def __init__(self, cost: StepCost, memory: PlainMemory, listener: WorkerListener) -> None:
        self.step = 0
        """That runs, or that ended last."""
        self.num_rows = 0
        self.num_context_tokens = 0
        """Of all rows, in the step that runs or is decided next."""
        self.fresh: list[FastRow] = []
        """They sample their first token after the prompt's in this step, or the next one to be decided."""
        self.eager: dict[SimRequestState, FastRow] = {}
        self.num_over = 0
        """Rows whose request is over."""
        self._cost = cost
        self._memory = memory
        self._listener = listener
        self._ends: dict[int, list[FastRow]] = {}
        """By step: who may sample the last token in it; those that are gone by then are still there."""
        self._growing = [0] * PAGE_TOKENS
        """Rows by `growth_phase`."""
        self._last_end_ns = 0
        self._gaps = StepGaps()

    def begin_step(self) -> None:
        """Raises MemoryIsTight."""
        self.step += 1
        num_pages = self._growing[self.step % PAGE_TOKENS]
        if num_pages:
            self._memory.count_used(num_pages)

    def take_ending(self) -> list[FastRow]:
        """Who samples the last token in the step that runs."""
        return [row for row in self._ends.pop(self.step, ()) if not row.is_gone]

    def end_step(self, now_ns: int, num_lazy: int) -> None:
        """`num_lazy` rows have not been reported one by one."""
        if num_lazy:
            gap_ns = now_ns - self._last_end_ns
            self._gaps.add(self.step, gap_ns)
            self._listener.on_gaps(gap_ns, num_lazy)
        self._last_end_ns = now_ns
        self.num_context_tokens += self.num_rows
        self.fresh.clear()

    def enter(self, row: FastRow) -> None:
        """It decodes from the next step on."""
        row.first_step, row.reported_step = self.step + 1, self.step
        self.num_rows += 1
        self.num_context_tokens += row.num_prompt_tokens + 1
        self._growing[row.growth_phase] += 1
        self._ends.setdefault(row.last_step, []).append(row)
        self.fresh.append(row)
        if row.is_over:
            self.num_over += 1
        elif row.is_eager:
            self.eager[row.state] = row

    def leave(self, row: FastRow) -> None:
        """It decodes no more; no step runs, or it has ended."""
        self.num_rows -= 1
        self.num_context_tokens -= row.context(self.step + 1)
        self._growing[row.growth_phase] -= 1
        self.num_over -= row.is_over
        self.eager.pop(row.state, None)

    def ignore(self, row: FastRow) -> None:
        """Its request is over, and what it samples until it is cancelled does not count."""
        row.is_over = True
        if row.first_step:
            self.eager.pop(row.state, None)
            self.num_over += 1

    def report(self, row: FastRow, step: int) -> None:
        """What it has sampled up to the end of this step, the last one that has ended."""
        num_tokens = step - row.reported_step
        if row.first_step and num_tokens > 0 and not (row.is_eager or row.is_over):
            longest_gap_ns = self._gaps.longest_since(row.reported_step + 1)
            self._listener.on_tokens(row.state, num_tokens, self._last_end_ns, longest_gap_ns)
            row.reported_step = step

    @property
    def duration_ns(self) -> int:
        """Of a step that computes no prompt."""
        return ns_of_ms(self._cost.step_ms((), self.num_rows, self.num_context_tokens))


class StepGaps:
    """Nanoseconds between the ends of consecutive steps: the longest since some step, in logarithmic time."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._gaps_ns: list[int] = []

    def add(self, step: int, gap_ns: int) -> None:
        """Only what no later gap exceeds is kept: gaps fall, steps rise."""
        while self._gaps_ns and self._gaps_ns[-1] <= gap_ns:
            self._gaps_ns.pop()
            self._steps.pop()
        self._steps.append(step)
        self._gaps_ns.append(gap_ns)

    def longest_since(self, step: int) -> int:
        """Among the steps from this one on, of which there must be one."""
        return self._gaps_ns[bisect_left(self._steps, step)]

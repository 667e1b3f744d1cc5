"""The sequences of a fast engine that decode: each samples a token in every step from its first to its last one."""

from bisect import bisect_left

from weir.core.cost import StepCost
from weir.kv.geometry import PAGE_TOKENS
from weir.sim.engines.fast_rows import FastRow
from weir.sim.memory.page_memory import PlainMemory
from weir.sim.request_state import SimRequestState
from weir.sim.timeline import ns_of_ms
from weir.sim.workers.worker import WorkerListener


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

"""The sequences of a fast engine that decode: each draws a token in every step from its first to its last one."""

from weir.core.cost import StepCost
from weir.kv.geometry import PAGE_TOKENS
from weir.sim.call import Call
from weir.sim.events import NS_PER_MS, Timeline, ns_of_ms
from weir.sim.fast_pages import FastPages
from weir.sim.fast_rows import Gaps, Row
from weir.sim.worker import WorkerListener


class FastBatch:
    """Steps are numbered from 1."""

    def __init__(self, cost: StepCost, pages: FastPages, listener: WorkerListener) -> None:
        self.step = 0
        """That runs, or that ended last."""
        self.num_rows = 0
        self.num_context_tokens = 0
        """Of all rows, in the step that runs or is decided next."""
        self.fresh: list[Row] = []
        """They draw their first token after the prompt's in this step, or the next one to be decided."""
        self.eager: dict[Call, Row] = {}
        self._cost = cost
        self._pages = pages
        self._listener = listener
        self._ends: dict[int, list[Row]] = {}
        """By step: who may draw the last token in it; those that are gone by then are still there."""
        self._growing = [0] * PAGE_TOKENS
        """Rows by `growth_phase`."""
        self._last_end_ns = 0
        self._gaps = Gaps()

    @property
    def is_quiet(self) -> bool:
        """Nothing but the next token of each comes of the step that runs."""
        return not (self.fresh or self.eager) and self.step not in self._ends

    def begin_step(self) -> None:
        self.step += 1
        num_pages = self._growing[self.step % PAGE_TOKENS]
        if num_pages:
            self._pages.grow(num_pages)

    def take_ending(self) -> list[Row]:
        """Who draws the last token in the step that runs."""
        ending = self._ends.pop(self.step, None)
        return [row for row in ending if not row.is_gone] if ending is not None else []

    def end_step(self, now_ns: int, num_lazy: int) -> None:
        """`num_lazy` rows have not been told of one by one."""
        if num_lazy:
            gap_ns = now_ns - self._last_end_ns
            self._gaps.add(self.step, gap_ns)
            self._listener.on_gaps(gap_ns, num_lazy)
        self._last_end_ns = now_ns
        self.num_context_tokens += self.num_rows
        self.fresh.clear()

    def enter(self, row: Row) -> None:
        """It decodes from the next step on."""
        row.first_step, row.told_step = self.step + 1, self.step
        self.num_rows += 1
        self.num_context_tokens += row.num_prompt_tokens + 1
        self._growing[row.growth_phase] += 1
        self._ends.setdefault(row.last_step, []).append(row)
        self.fresh.append(row)
        if row.is_eager:
            self.eager[row.call] = row

    def leave(self, row: Row) -> None:
        """It decodes no more; no step runs, or it has ended."""
        self.num_rows -= 1
        self.num_context_tokens -= row.context(self.step + 1)
        self._growing[row.growth_phase] -= 1
        self.eager.pop(row.call, None)

    def settle(self, row: Row, step: int) -> None:
        """Tells what it has drawn up to the end of this step, the last one that has ended."""
        num_tokens = step - row.told_step
        if row.first_step and num_tokens > 0 and not row.is_eager:
            longest_gap_ns = self._gaps.longest_since(row.told_step + 1)
            self._listener.on_tokens(row.call, num_tokens, self._last_end_ns, longest_gap_ns)
            row.told_step = step

    def run(self, timeline: Timeline, duration_ns: int) -> tuple[int, int, int]:
        """Quiet steps in a row: the one that runs ends, and so on until something else is planned on the timeline, or
        somebody ends, or a page is lacking. How many ended, nanoseconds of those that began, and how long the one that
        runs then takes. Their durations are those of `StepCost.step_ms`, to the bit."""
        num_rows, growing, ends = self.num_rows, self._growing, self._ends
        base_ms = self._cost.base_ms + self._cost.decode_sequence_ms * num_rows
        token_ms, num_tokens = self._cost.context_token_ms, self.num_context_tokens
        step, first_step, now_ns, last_end_ns = self.step, self.step, timeline.now_ns, self._last_end_ns
        next_ns, busy_ns, gap_ns = timeline.next_ns, 0, 0
        while next_ns is None or now_ns + duration_ns < next_ns:
            num_pages = growing[(step + 1) % PAGE_TOKENS]
            if num_pages and not self._pages.try_grow(num_pages):
                break
            now_ns += duration_ns
            gap_ns = now_ns - last_end_ns
            if step == first_step:
                self._gaps.add(step, gap_ns)
            self._listener.on_gaps(gap_ns, num_rows)
            last_end_ns = now_ns
            num_tokens += num_rows
            step += 1
            duration_ns = round((base_ms + token_ms * num_tokens) * NS_PER_MS)
            busy_ns += duration_ns
            if step in ends:
                break
        if step > first_step:
            # From the second one on gaps only grow, for contexts do: the last one stands for all of them.
            self._gaps.add(step - 1, gap_ns)
            timeline.skip_to(now_ns)
            self.step, self.num_context_tokens, self._last_end_ns = step, num_tokens, last_end_ns
        return step - first_step, busy_ns, duration_ns

    @property
    def duration_ns(self) -> int:
        """Of a step in which nobody reads a prompt."""
        return ns_of_ms(self._cost.step_ms((), self.num_rows, self.num_context_tokens))

    def clear(self) -> None:
        """All go on elsewhere."""
        self.fresh.clear()
        self.eager.clear()
        self._ends.clear()
        self._growing = [0] * PAGE_TOKENS
        self.num_rows = self.num_context_tokens = 0

"""The sequences of a fast engine that decode: each draws a token in every step from its first to its last one."""

from bisect import bisect_left
from itertools import groupby

from weir.core.cost import StepCost
from weir.kv.geometry import PAGE_TOKENS
from weir.sim.call import SimRequestState
from weir.sim.engines.fast_pages import FastPages
from weir.sim.engines.fast_rows import FastRow, Gaps
from weir.sim.events import NS_PER_MS, ns_of_ms
from weir.sim.workers.worker import WorkerListener

_MAX_AHEAD = 64
"""Steps that are looked ahead: pages are taken for all of them."""


class FastBatch:
    """Steps are numbered from 1."""

    def __init__(self, cost: StepCost, pages: FastPages, listener: WorkerListener) -> None:
        self.step = 0
        """That runs, or that ended last."""
        self.num_rows = 0
        self.num_context_tokens = 0
        """Of all rows, in the step that runs or is decided next."""
        self.fresh: list[FastRow] = []
        """They draw their first token after the prompt's in this step, or the next one to be decided."""
        self.eager: dict[SimRequestState, FastRow] = {}
        """Each of their tokens is told when it is drawn."""
        self.num_over = 0
        """Rows of whose tokens nobody wants to hear."""
        self._cost = cost
        self._pages = pages
        self._listener = listener
        self._ends: dict[int, list[FastRow]] = {}
        """By step: who may draw the last token in it; those that are gone by then are still there."""
        self._growing = [0] * PAGE_TOKENS
        """Rows by `growth_phase`."""
        self._last_end_ns = 0
        self._gaps = Gaps()
        self._ahead_ns: list[int] = []
        """When the step ends that runs, and those that were looked ahead after it."""

    @property
    def is_quiet(self) -> bool:
        """Nothing but the next token of each comes of the step that runs."""
        return not (self.fresh or self.eager) and self.step not in self._ends

    def begin_step(self) -> None:
        self.step += 1
        num_pages = self._growing[self.step % PAGE_TOKENS]
        if num_pages:
            self._pages.grow(num_pages)

    def take_ending(self) -> list[FastRow]:
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

    def enter(self, row: FastRow) -> None:
        """It decodes from the next step on."""
        row.first_step, row.told_step = self.step + 1, self.step
        self.num_rows += 1
        self.num_context_tokens += row.num_prompt_tokens + 1
        self._growing[row.growth_phase] += 1
        self._ends.setdefault(row.last_step, []).append(row)
        self.fresh.append(row)
        if row.is_over:
            self.num_over += 1
        elif row.is_eager:
            self.eager[row.call] = row

    def leave(self, row: FastRow) -> None:
        """It decodes no more; no step runs, or it has ended."""
        self.num_rows -= 1
        self.num_context_tokens -= row.context(self.step + 1)
        self._growing[row.growth_phase] -= 1
        self.num_over -= row.is_over
        self.eager.pop(row.call, None)

    def let_be(self, row: FastRow) -> None:
        """Its request is over, and what it draws until it is cancelled does not count."""
        row.is_over = True
        if row.first_step:
            self.eager.pop(row.call, None)
            self.num_over += 1

    def settle(self, row: FastRow, step: int) -> None:
        """Tells what it has drawn up to the end of this step, the last one that has ended."""
        num_tokens = step - row.told_step
        if row.first_step and num_tokens > 0 and not (row.is_eager or row.is_over):
            longest_gap_ns = self._gaps.longest_since(row.told_step + 1)
            self._listener.on_tokens(row.call, num_tokens, self._last_end_ns, longest_gap_ns)
            row.told_step = step

    def look_ahead(self, ends_ns: int) -> int:
        """The step that runs ends at `ends_ns`. When the first one ends from it on of which anything comes but the next
        token of each; there are pages up to there. Durations are those of `StepCost.step_ms`, to the bit."""
        cost, num_rows = self._cost, self.num_rows
        base_ms, token_ms = cost.base_ms + cost.decode_sequence_ms * num_rows, cost.context_token_ms
        num_tokens, num_pages, num_spare = self.num_context_tokens, 0, self._pages.num_spare
        self._ahead_ns = ahead_ns = [ends_ns]
        for following in range(self.step + 1, self.step + _MAX_AHEAD):
            num_following = num_pages + self._growing[following % PAGE_TOKENS]
            if following - 1 in self._ends or num_following > num_spare:
                break
            num_pages = num_following
            num_tokens += num_rows
            ends_ns += round((base_ms + token_ms * num_tokens) * NS_PER_MS)
            ahead_ns.append(ends_ns)
        if num_pages:
            self._pages.reserve(num_pages)
        return ends_ns

    def catch_up(self, now_ns: int) -> tuple[int, int, int]:
        """After `look_ahead`: steps that end before now are over. How many that were, nanoseconds of those that began
        after them, and when the one ends that runs now."""
        num_steps, begins_ns = bisect_left(self._ahead_ns, now_ns), self._ahead_ns[0]
        ended_ns, self._ahead_ns = self._ahead_ns[:num_steps], self._ahead_ns[num_steps:]
        ends_ns = self._ahead_ns[0]
        if num_steps:
            self._add_gaps(ended_ns)
            num_pages = sum(self._growing[(self.step + 1 + number) % PAGE_TOKENS] for number in range(num_steps))
            if num_pages:
                self._pages.grow(num_pages)
            self.step += num_steps
            self.num_context_tokens += num_steps * self.num_rows
        return num_steps, ends_ns - begins_ns, ends_ns

    def _add_gaps(self, ended_ns: list[int]) -> None:
        """Steps ended in which nobody drew a token but those who draw one in each."""
        num_lazy = self.num_rows - self.num_over
        gaps_ns = [
            ends_ns - began_ns for ends_ns, began_ns in zip(ended_ns, (self._last_end_ns, *ended_ns), strict=False)
        ]
        self._last_end_ns = ended_ns[-1]
        # From the second one on gaps only grow, for contexts do: the last one stands for all of them.
        self._gaps.add(self.step, gaps_ns[0])
        self._gaps.add(self.step + len(gaps_ns) - 1, gaps_ns[-1])
        if num_lazy:
            for gap_ms, alike in groupby(gaps_ns, key=_ms_of):
                self._listener.on_gaps(gap_ms * NS_PER_MS, num_lazy * sum(1 for _ in alike))

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
        self.num_rows = self.num_context_tokens = self.num_over = 0


def _ms_of(time_ns: int) -> int:
    return time_ns // NS_PER_MS

"""Steady stretches of a decode or local worker, at a cost that does not grow with the batch.

While there are pages for all, one lane, no policy's gate or step budget, and sequences that all join as they come, a
batch needs no looking through: every sequence that decodes draws one token a step, so it is known in advance in which
step it ends and when it needs a page. What goes on is what `LocalBatcher` and `DecodeBatcher` do, to the nanosecond:
a test runs both. `switching_engine` goes over to the real batcher before that ends.
"""

from collections import deque
from collections.abc import Mapping

from weir.core.cost import Chunk, StepCost
from weir.engine.messages import Arrival, SequenceKey
from weir.kv.geometry import PAGE_TOKENS
from weir.sim.call import Call, Calls
from weir.sim.events import Timeline, ns_of_ms
from weir.sim.fast_pages import FastPages
from weir.sim.fast_rows import Gaps, Row, plan_prompts
from weir.sim.spec import PoolSpec
from weir.sim.worker import WorkerListener

_COUNTED: tuple[str, ...] = (
    "steps",
    "prefill_steps",
    "decode_steps",
    "prompt_tokens_computed",
    "output_tokens_computed",
)
_COUNTED += ("tokens_generated", "taken_over", "finished", "cancelled")
"""Of `weir.engine.counters`, all that can rise here."""


class FastEngine:
    """`begin_step` and `end_step` as the engines that workers turn have them."""

    def __init__(
        self, pool: PoolSpec, pages: FastPages, calls: Calls, timeline: Timeline, listener: WorkerListener
    ) -> None:
        self.busy_ns = 0
        self._cost: StepCost = pool.profile.step
        self._max_tokens = pool.max_num_batched_tokens
        self._chunk_tokens = pool.chunk_tokens
        self._max_running = min(pool.max_num_seqs, pool.max_num_batched_tokens)
        self._pages = pages
        self._calls = calls
        self._timeline = timeline
        self._listener = listener
        self._rows: dict[SequenceKey, Row] = {}
        self._waiting: deque[Row] = deque()
        self._prompts: list[Row] = []
        self._fresh: list[Row] = []
        """They draw their first token after the prompt's in this step, or the next one to be decided."""
        self._eager: dict[SequenceKey, Row] = {}
        self._ends: dict[int, list[Row]] = {}
        """By step: who may draw the last token in it; those that are gone by then are still there."""
        self._growing = [0] * PAGE_TOKENS
        """Sequences by `growth_phase`."""
        self._num_decodes = 0
        self._num_context_tokens = 0
        """Of all that decode, in the step that runs or is decided next."""
        self._chunks: list[tuple[Row, int]] = []
        self._step = 0
        self._is_stepping = False
        self._last_end_ns = 0
        self._num_arrivals = 0
        self._gaps = Gaps()
        self._counts = dict.fromkeys(_COUNTED, 0)

    @property
    def rows(self) -> Mapping[SequenceKey, Row]:
        """In the order in which they came."""
        return self._rows

    @property
    def num_done_steps(self) -> int:
        """Steps that have ended."""
        return self._step - self._is_stepping

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._rows) - len(self._waiting)

    @property
    def has_room(self) -> bool:
        """Whether the next step can be decided here: whoever may join, and all that grow, get their pages."""
        num_pages = sum(row.num_prompt_pages for row in self._waiting if row.arrival.slot is None)
        return self._pages.has_room(num_pages + len(self._rows))

    def counters(self) -> Mapping[str, int]:
        return self._counts

    def add(self, arrival: Arrival) -> None:
        call = self._calls[arrival.facts.request_id]
        self._num_arrivals += 1
        num_prompt_tokens = call.request.num_prompt_tokens
        row = Row(call, arrival, self._num_arrivals, num_prompt_tokens, arrival.num_computed_tokens)
        row.is_eager = call.expires_ns is not None or call.is_over
        self._rows[call.key] = row
        self._waiting.append(row)
        self._counts["taken_over"] += arrival.slot is not None
        call.settle = self._settle_for_good

    def cancel(self, key: SequenceKey) -> None:
        row = self._rows.get(key)
        if row is None:
            return
        self._counts["cancelled"] += 1
        if row in self._waiting:
            self._waiting.remove(row)
            self._drop(row, num_grown_pages=None)
        elif row.first_step == 0:
            self._prompts.remove(row)
            self._drop(row, num_grown_pages=0)
        else:
            if row in self._fresh:
                self._fresh.remove(row)
            self._leave(row)
            self._num_context_tokens -= row.context(self._step + 1)
            self._drop(row, row.num_grown_pages(self._step))

    def begin_step(self) -> int | None:
        while self._waiting and len(self._rows) - len(self._waiting) < self._max_running:
            self._join(self._waiting.popleft())
        if not self._num_decodes and not self._prompts:
            return None
        self._step += 1
        self._is_stepping = True
        self._pages.grow(self._growing[self._step % PAGE_TOKENS])
        chunks: list[Chunk] = []
        num_decodes, num_context_tokens = self._num_decodes, self._num_context_tokens
        if self._prompts:
            chunks, num_singles, num_single_tokens = self._plan_prompts()
            num_decodes += num_singles
            num_context_tokens += num_single_tokens
        duration_ns = ns_of_ms(self._cost.step_ms(chunks, num_decodes, num_context_tokens))
        self._counts["steps"] += 1
        self.busy_ns += duration_ns
        return duration_ns

    def end_step(self) -> None:
        step, now_ns = self._step, self._timeline.now_ns
        ending = [row for row in self._ends.pop(step, ()) if self._rows.get(row.call.key) is row]
        num_lazy = self._num_decodes
        if ending or self._fresh or self._eager or self._chunks:
            num_lazy = self._tell(step, ending)
        if num_lazy:
            gap_ns = now_ns - self._last_end_ns
            self._gaps.add(step, gap_ns)
            self._listener.on_gaps(gap_ns, num_lazy)
        self._last_end_ns = now_ns
        self._is_stepping = False
        self._count_step()
        self._num_context_tokens += self._num_decodes
        self._counts["finished"] += len(ending)
        for row in ending:
            self._leave(row)
            self._num_context_tokens -= row.context(step + 1)
            self._drop(row, row.num_grown_pages(step))
        self._fresh.clear()
        if self._chunks:
            self._end_chunks()

    def is_quiet(self) -> bool:
        """Nothing but the next token of each comes of the step that runs, and none is decided otherwise after it."""
        return not (self._chunks or self._fresh or self._eager or self._waiting or self._prompts) and (
            self._step not in self._ends
        )

    def settle_all(self) -> None:
        """Tells what every sequence has drawn."""
        for row in self._rows.values():
            self._settle(row, self.num_done_steps)

    def forget_all(self) -> None:
        """They go on elsewhere."""
        for row in self._rows.values():
            row.call.settle = None
        self._rows.clear()
        self._waiting.clear()
        self._prompts.clear()
        self._fresh.clear()
        self._eager.clear()
        self._ends.clear()
        self._growing = [0] * PAGE_TOKENS
        self._num_decodes = self._num_context_tokens = 0

    def _join(self, row: Row) -> None:
        row.is_waiting = False
        if row.arrival.slot is None:
            self._pages.grow(row.num_prompt_pages)
            self._prompts.append(row)
        else:
            self._enter(row)

    def _enter(self, row: Row) -> None:
        """It decodes from the next step on."""
        row.first_step, row.told_step = self._step + 1, self._step
        self._num_decodes += 1
        self._num_context_tokens += row.context(row.first_step)
        self._growing[row.growth_phase] += 1
        self._ends.setdefault(row.last_step, []).append(row)
        self._fresh.append(row)
        if row.is_eager:
            self._eager[row.call.key] = row

    def _leave(self, row: Row) -> None:
        """It decodes no more."""
        self._num_decodes -= 1
        self._growing[row.growth_phase] -= 1
        self._eager.pop(row.call.key, None)

    def _drop(self, row: Row, num_grown_pages: int | None) -> None:
        """It is gone; None: it had not joined."""
        del self._rows[row.call.key]
        row.call.settle = None
        is_placed = row.arrival.slot is None and num_grown_pages is not None
        self._pages.shrink((num_grown_pages or 0) + (row.num_prompt_pages if is_placed else 0))
        if self._pages.give_back(row.arrival):
            self._listener.on_pages_free(self._pages.memory)

    def _plan_prompts(self) -> tuple[list[Chunk], int, int]:
        """Chunks of more than one token; how many have one, and the tokens that those read."""
        planned = plan_prompts(self._prompts, self._max_tokens - self._num_decodes, self._chunk_tokens)
        self._chunks = planned
        singles = [row.num_computed + 1 for row, num_tokens in planned if num_tokens == 1]
        chunks = [Chunk(num_tokens, row.num_computed) for row, num_tokens in planned if num_tokens > 1]
        return chunks, len(singles), sum(singles)

    def _tell(self, step: int, ending: list[Row]) -> int:
        """Whose token is more than the next of many: decodes in order, then prompts. How many decodes are left."""
        decodes = {row.order: row for row in (*self._fresh, *self._eager.values(), *ending)}
        ends = {row.order for row in ending}
        # A prompt's last token is computed among the decodes.
        firsts = {row.order: row for row, _ in self._chunks if row.num_uncomputed == 1}
        for order, row in sorted((decodes | firsts).items()):
            if order in firsts:
                self._tell_first(row)
                continue
            self._settle(row, step - 1)
            row.told_step = step
            self._tell_token(row.call, is_last=order in ends)
        for row, num_tokens in self._chunks:
            if row.order not in firsts and row.num_uncomputed == num_tokens:
                self._tell_first(row)
        return self._num_decodes - len(decodes)

    def _tell_first(self, row: Row) -> None:
        self._tell_token(row.call, is_last=row.call.num_true_tokens == 1)

    def _tell_token(self, call: Call, *, is_last: bool) -> None:
        if is_last:
            call.settle = None
        self._listener.on_token(call, is_last=is_last)

    def _end_chunks(self) -> None:
        chunks, self._chunks = self._chunks, []
        for row, num_tokens in chunks:
            row.num_computed += num_tokens
            self._counts["prompt_tokens_computed"] += num_tokens
            if row.num_uncomputed:
                continue
            self._prompts.remove(row)
            self._counts["tokens_generated"] += 1
            if row.call.num_true_tokens == 1:
                self._counts["finished"] += 1
                self._drop(row, num_grown_pages=0)
            else:
                self._enter(row)
        self._counts["prefill_steps"] += bool(chunks)

    def _count_step(self) -> None:
        counts = self._counts
        counts["decode_steps"] += self._num_decodes > 0
        counts["output_tokens_computed"] += self._num_decodes
        counts["tokens_generated"] += self._num_decodes

    def _settle(self, row: Row, step: int) -> None:
        """Tells what it has drawn up to the end of this step, the last one that has ended."""
        num_tokens = step - row.told_step
        if row.first_step and num_tokens > 0 and not row.is_eager:
            longest_gap_ns = self._gaps.longest_since(row.told_step + 1)
            self._listener.on_tokens(row.call, num_tokens, self._last_end_ns, longest_gap_ns)
            row.told_step = step

    def _settle_for_good(self, call: Call, *, is_over: bool) -> None:
        """From here on each of its tokens is told, if it is over, so that nobody counts them."""
        row = self._rows[call.key]
        self._settle(row, self.num_done_steps)
        if is_over:
            row.is_eager = True
            if row.first_step:
                row.told_step = self.num_done_steps
                self._eager[call.key] = row

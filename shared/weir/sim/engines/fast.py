"""Steady stretches of a decode or local worker, at a cost that does not grow with the batch.

While there are pages for all, one lane, no policy's gate or step budget, and sequences that all join as they come, a
batch needs no looking through: every sequence that decodes draws one token a step, so it is known in advance in which
step it ends and when it needs a page. What goes on is what `RunningBatcher` does, to the nanosecond:
a test runs both. `switching_engine` goes over to the real batcher before that ends.
"""

from collections import deque
from collections.abc import Mapping

from weir.sim.call import SimRequestState
from weir.sim.engines.fast_batch import FastBatch
from weir.sim.engines.fast_pages import FastPages
from weir.sim.engines.fast_rows import FastRow, plan_prompts
from weir.sim.engines.step_time import step_ns
from weir.sim.events import Coincidence, Timeline
from weir.sim.spec import PoolSpec
from weir.sim.workers.arriving import SimArrival
from weir.sim.workers.worker import WorkerListener

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

    def __init__(self, pool: PoolSpec, pages: FastPages, timeline: Timeline, listener: WorkerListener) -> None:
        self.busy_ns = 0
        self._is_ahead = False
        """Steps after the one that runs were looked ahead."""
        self._cost = pool.profile.step
        self.max_step_tokens = pool.max_num_batched_tokens
        self._chunk_tokens = pool.chunk_tokens
        self._max_running = min(pool.max_num_seqs, pool.max_num_batched_tokens)
        self._pages = pages
        self._timeline = timeline
        self._listener = listener
        self._rows: dict[SimRequestState, FastRow] = {}
        self._waiting: deque[FastRow] = deque()
        self._prompts: list[FastRow] = []
        self._batch = FastBatch(pool.profile.step, pages, listener)
        self._chunks: list[tuple[FastRow, int]] = []
        self._is_stepping = False
        self._num_arrivals = 0
        self._counts = dict.fromkeys(_COUNTED, 0)

    @property
    def rows(self) -> Mapping[SimRequestState, FastRow]:
        """In the order in which they came."""
        return self._rows

    @property
    def num_done_steps(self) -> int:
        """Steps that have ended."""
        return self._batch.step - self._is_stepping

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._rows) - len(self._waiting)

    @property
    def has_room(self) -> bool:
        """Whether the next step can be decided here: whoever may join, and all that grow, get their pages."""
        num_pages = len(self._rows)
        if self._waiting:
            num_pages += sum(row.num_prompt_pages for row in self._waiting if row.arrival.slot is None)
        return self._pages.has_room(num_pages)

    def counters(self) -> Mapping[str, int]:
        return self._counts

    def add(self, arrival: SimArrival) -> None:
        call = arrival.call
        self._num_arrivals += 1
        num_prompt_tokens = call.request.num_prompt_tokens
        row = FastRow(call, arrival, self._num_arrivals, num_prompt_tokens)
        row.is_eager, row.is_over = call.expires_ns is not None, call.is_over
        self._rows[call] = row
        self._waiting.append(row)
        if arrival.slot is not None:
            row.num_computed = num_prompt_tokens
            self._counts["taken_over"] += 1
        call.settle = self._settle_for_good

    def cancel(self, call: SimRequestState) -> None:
        row = self._rows.get(call)
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
            if row in self._batch.fresh:
                self._batch.fresh.remove(row)
            self._batch.leave(row)
            self._drop(row, row.num_grown_pages(self._batch.step))

    def begin_step(self) -> int | None:
        batch = self._batch
        while self._waiting and len(self._rows) - len(self._waiting) < self._max_running:
            self._join(self._waiting.popleft())
        if not batch.num_rows and not self._prompts:
            return None
        batch.begin_step()
        self._is_stepping = True
        duration_ns = self._plan_prompts() if self._prompts else batch.duration_ns
        self._counts["steps"] += 1
        self.busy_ns += duration_ns
        return duration_ns

    def end_step(self) -> None:
        batch = self._batch
        self._is_ahead = False
        ending, num_lazy = batch.take_ending(), batch.num_rows - batch.num_over
        if ending or batch.fresh or batch.eager or self._chunks:
            num_lazy = self._tell(ending)
        batch.end_step(self._timeline.now_ns, num_lazy)
        self._is_stepping = False
        self._count_decodes(1)
        for row in ending:
            self._counts["finished"] += 1
            batch.leave(row)
            self._drop(row, row.num_grown_pages(batch.step))
        if self._chunks:
            self._end_chunks()

    def look_ahead(self, ends_ns: int) -> int:
        """As `weir.sim.workers.worker.Engine` has it."""
        if self._chunks or self._waiting or self._prompts or not self._batch.is_quiet:
            return ends_ns
        self._is_ahead = True
        return self._batch.look_ahead(ends_ns)

    def catch_up(self) -> int:
        """As `weir.sim.workers.worker.Engine` has it."""
        num_steps, busy_ns, ends_ns = self._batch.catch_up(self._timeline.now_ns)
        self._counts["steps"] += num_steps
        self._count_decodes(num_steps)
        self.busy_ns += busy_ns
        return ends_ns

    def settle_all(self) -> None:
        """Tells what every sequence has drawn."""
        self._catch_up_to_the_past()
        settle, step = self._batch.settle, self.num_done_steps
        for row in self._rows.values():
            settle(row, step)

    def forget_all(self) -> None:
        """They go on elsewhere, or are lost."""
        for row in self._rows.values():
            row.call.settle = None
        self._rows.clear()
        self._waiting.clear()
        self._prompts.clear()
        self._batch.clear()

    def _join(self, row: FastRow) -> None:
        row.is_waiting = False
        if row.arrival.slot is None:
            self._pages.grow(row.num_prompt_pages)
            self._prompts.append(row)
        else:
            self._batch.enter(row)

    def _drop(self, row: FastRow, num_grown_pages: int | None) -> None:
        """It is gone; None: it had not joined."""
        del self._rows[row.call]
        row.is_gone = True
        row.call.settle = None
        is_placed = row.arrival.slot is None and num_grown_pages is not None
        self._pages.shrink((num_grown_pages or 0) + (row.num_prompt_pages if is_placed else 0))
        if self._pages.give_back(row.arrival):
            self._listener.on_pages_free(self._pages.memory)

    def _plan_prompts(self) -> int:
        """Nanoseconds of a step with what is read of prompts in it."""
        batch = self._batch
        self._chunks = plan_prompts(self._prompts, self.max_step_tokens - batch.num_rows, self._chunk_tokens)
        return step_ns(self._cost, self._chunks, batch.num_rows, batch.num_context_tokens)

    def _tell(self, ending: list[FastRow]) -> int:
        """Whose token is more than the next of many: decodes in order, then prompts. How many decodes are left."""
        batch = self._batch
        ends, rows = set(ending), (*batch.fresh, *batch.eager.values(), *ending)
        decodes = dict.fromkeys(row for row in rows if not row.is_over)
        # A prompt's last token is computed among the decodes.
        firsts = {row: None for row, _ in self._chunks if row.num_uncomputed == 1}
        told = [*decodes, *firsts]
        if len(told) > 1:
            told.sort(key=_order)
        for row in told:
            if row in firsts:
                self._tell_first(row)
                continue
            batch.settle(row, batch.step - 1)
            row.told_step = batch.step
            self._tell_token(row.call, is_last=row in ends)
        for row, num_tokens in self._chunks:
            if row not in firsts and row.num_uncomputed == num_tokens:
                self._tell_first(row)
        return batch.num_rows - batch.num_over - len(decodes)

    def _tell_first(self, row: FastRow) -> None:
        self._tell_token(row.call, is_last=row.call.num_true_tokens == 1)

    def _tell_token(self, call: SimRequestState, *, is_last: bool) -> None:
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
                self._batch.enter(row)
        self._counts["prefill_steps"] += bool(chunks)

    def _count_decodes(self, num_steps: int) -> None:
        """Of so many steps with the batch as it is."""
        counts, num_rows = self._counts, self._batch.num_rows
        if num_rows:
            counts["decode_steps"] += num_steps
            counts["output_tokens_computed"] += num_steps * num_rows
            counts["tokens_generated"] += num_steps * num_rows

    def _settle_for_good(self, call: SimRequestState, *, is_over: bool) -> None:
        """If it is over, nobody wants to hear of what it draws from here on."""
        self._catch_up_to_the_past()
        row = self._rows[call]
        self._batch.settle(row, self.num_done_steps)
        if is_over and not row.is_over:
            self._batch.let_be(row)

    def _catch_up_to_the_past(self) -> None:
        if self._is_ahead and self.catch_up() == self._timeline.now_ns:
            raise Coincidence(f"a step ends at {self._timeline.now_ns} ns, when it is asked what was drawn")


def _order(row: FastRow) -> int:
    return row.order

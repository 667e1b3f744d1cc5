"""A local or decode worker's steps at a cost that does not grow with the batch.

While there are pages for all, one lane, no policy's gate or step budget, and sequences that all join as they come, a
batch needs no looking through: every sequence that decodes samples one token a step, so it is known in advance in which
step it ends and when it needs a page. What comes out is what comes of a `RunningBatcher`, to the nanosecond: a test
runs both. Before that ends another engine goes on, with the real batcher.
"""

from collections import deque
from collections.abc import Callable, Mapping

from weir.engine.messages import Failure, PageBundle, SetBounds
from weir.sim.engines.fast_batch import FastBatch, FastRow, plan_prompts, step_ns
from weir.sim.memory import PlainMemory
from weir.sim.request_state import SimRequestState
from weir.sim.spec import PoolSpec
from weir.sim.timeline import Timeline
from weir.sim.worker import Engine, SimArrival, WorkerListener

_COUNTED = (
    "steps",
    "prefill_steps",
    "decode_steps",
    "prompt_tokens_computed",
    "output_tokens_computed",
    "tokens_generated",
    "taken_over",
    "finished",
    "cancelled",
)
"""Of `weir.engine.counters`, all that can rise here."""


class FastEngine:
    """Implements `weir.sim.worker.Engine`. Pages are only counted; those of a hand-off have ids."""

    def __init__(
        self,
        pool: PoolSpec,
        memory: PlainMemory,
        worker_index: int,
        timeline: Timeline,
        listener: WorkerListener,
        go_exact: "Callable[[FastEngine], Engine] | None",
    ) -> None:
        """`go_exact`: hands everything to an engine that the worker drives from then on, when pages may run short; None
        where the memory raises MemoryIsTight instead."""
        self.busy_ns = 0
        self.max_step_tokens = pool.max_num_batched_tokens
        self._cost = pool.profile.step
        self._chunk_tokens = pool.chunk_tokens
        self._max_running = min(pool.max_num_seqs, pool.max_num_batched_tokens)
        self._memory = memory
        self._worker_index = worker_index
        self._timeline = timeline
        self._listener = listener
        self._go_exact = go_exact
        self._rows: dict[SimRequestState, FastRow] = {}
        self._waiting: deque[FastRow] = deque()
        self._prompts: list[FastRow] = []
        self._batch = FastBatch(pool.profile.step, memory, listener)
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
    def next_deadline_s(self) -> float | None:
        return None

    @property
    def _has_room(self) -> bool:
        """Whether the next step can be decided here: whoever may join, and all that grow, get their pages."""
        num_pages = len(self._rows) + sum(row.num_prompt_pages for row in self._waiting if row.arrival.slot is None)
        return self._memory.num_free_pages >= num_pages

    def counters(self) -> Mapping[str, float]:
        return {name: float(value) for name, value in self._counts.items()}

    def add(self, arrival: SimArrival) -> None:
        state = arrival.state
        self._num_arrivals += 1
        num_prompt_tokens = state.request.num_prompt_tokens
        row = FastRow(state, arrival, self._num_arrivals, num_prompt_tokens)
        row.is_eager, row.is_over = state.expires_ns is not None, state.is_over
        self._rows[state] = row
        self._waiting.append(row)
        if arrival.slot is not None:
            row.num_computed = num_prompt_tokens
            self._counts["taken_over"] += 1
        state.settle = self._settle_for_good

    def cancel(self, state: SimRequestState) -> None:
        row = self._rows.get(state)
        if row is None:
            return
        self._counts["cancelled"] += 1
        if row in self._waiting:
            self._waiting.remove(row)
            self._drop(row, num_pages=0)
        elif row.first_step == 0:
            self._prompts.remove(row)
            self._drop(row, row.num_prompt_pages)
        else:
            if row in self._batch.fresh:
                self._batch.fresh.remove(row)
            self._end_decoding(row)

    def fail(self, state: SimRequestState, failure: Failure) -> None:
        raise AssertionError(f"{state.request.request_id}: only a prefill worker's hand-off is refused ({failure})")

    def forget(self, state: SimRequestState, copied: PageBundle | None) -> None:
        raise AssertionError(f"{state.request.request_id}: only a prefill worker hands off ({copied})")

    def set_bounds(self, bounds: SetBounds) -> None:
        raise ValueError(f"{bounds}: a fast engine has the bounds that it was made with")

    def begin_step(self) -> int | None:
        """Raises MemoryIsTight."""
        if self._go_exact is not None and not self._has_room:
            return self._go_exact(self).begin_step()
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
        batch, counts = self._batch, self._counts
        ending, num_lazy = batch.take_ending(), batch.num_rows - batch.num_over
        if ending or batch.fresh or batch.eager or self._chunks:
            num_lazy = self._report_tokens(ending)
        batch.end_step(self._timeline.now_ns, num_lazy)
        self._is_stepping = False
        if batch.num_rows:
            counts["decode_steps"] += 1
            counts["output_tokens_computed"] += batch.num_rows
            counts["tokens_generated"] += batch.num_rows
        for row in ending:
            counts["finished"] += 1
            self._end_decoding(row)
        if self._chunks:
            self._end_chunks()

    def settle_all(self) -> None:
        report, step = self._batch.report, self.num_done_steps
        for row in self._rows.values():
            report(row, step)

    def die(self) -> None:
        for row in self._rows.values():
            row.state.settle = None

    def integrity_errors(self) -> list[str]:
        return [f"{len(self._rows)} sequences are here when all requests have ended"] if self._rows else []

    def give_memory_back(self) -> None:
        """It holds nothing but what its sequences have."""

    def _join(self, row: FastRow) -> None:
        row.is_waiting = False
        if row.arrival.slot is None:
            self._memory.count_used(row.num_prompt_pages)
            self._prompts.append(row)
        else:
            self._batch.enter(row)

    def _end_decoding(self, row: FastRow) -> None:
        self._batch.leave(row)
        num_prompt_pages = row.num_prompt_pages if row.arrival.slot is None else 0
        self._drop(row, num_prompt_pages + row.num_grown_pages(self._batch.step))

    def _drop(self, row: FastRow, num_pages: int) -> None:
        """It is gone, and so are `num_pages` that were counted, and what it came with."""
        del self._rows[row.state]
        row.is_gone = True
        row.state.settle = None
        self._memory.count_used(-num_pages)
        if row.arrival.slot is not None:
            self._memory.release(self._worker_index, PageBundle(row.arrival.page_ids, (row.arrival.slot,)), ())

    def _plan_prompts(self) -> int:
        """Nanoseconds of a step that computes prompts too."""
        batch = self._batch
        self._chunks = plan_prompts(self._prompts, self.max_step_tokens - batch.num_rows, self._chunk_tokens)
        parts = ((row.num_computed, num_tokens) for row, num_tokens in self._chunks)
        return step_ns(self._cost, parts, batch.num_rows, batch.num_context_tokens)

    def _report_tokens(self, ending: list[FastRow]) -> int:
        """Of those whose token is more than the next of many: decodes in order, then prompts. How many decodes are
        left."""
        batch = self._batch
        ends, rows = set(ending), (*batch.fresh, *batch.eager.values(), *ending)
        decodes = dict.fromkeys(row for row in rows if not row.is_over)
        # A prompt's last token is computed among the decodes.
        firsts = {row: None for row, _ in self._chunks if row.num_uncomputed == 1}
        for row in sorted([*decodes, *firsts], key=_order):
            if row in firsts:
                self._report_first(row)
                continue
            batch.report(row, batch.step - 1)
            row.reported_step = batch.step
            self._report(row.state, is_last=row in ends)
        for row, num_tokens in self._chunks:
            if row not in firsts and row.num_uncomputed == num_tokens:
                self._report_first(row)
        return batch.num_rows - batch.num_over - len(decodes)

    def _report_first(self, row: FastRow) -> None:
        self._report(row.state, is_last=row.state.num_true_tokens == 1)

    def _report(self, state: SimRequestState, *, is_last: bool) -> None:
        if is_last:
            state.settle = None
        self._listener.on_token(state, is_last=is_last)

    def _end_chunks(self) -> None:
        chunks, self._chunks = self._chunks, []
        for row, num_tokens in chunks:
            row.num_computed += num_tokens
            self._counts["prompt_tokens_computed"] += num_tokens
            if row.num_uncomputed:
                continue
            self._prompts.remove(row)
            self._counts["tokens_generated"] += 1
            if row.state.num_true_tokens == 1:
                self._counts["finished"] += 1
                self._drop(row, row.num_prompt_pages)
            else:
                self._batch.enter(row)
        self._counts["prefill_steps"] += 1

    def _settle_for_good(self, state: SimRequestState) -> None:
        """What it samples from here on is not reported."""
        row = self._rows[state]
        self._batch.report(row, self.num_done_steps)
        if not row.is_over:
            self._batch.ignore(row)


def _order(row: FastRow) -> int:
    return row.order

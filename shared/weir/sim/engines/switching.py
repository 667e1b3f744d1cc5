"""A local worker's engine: fast while there are pages for all, the real batcher from then on."""

from collections.abc import Callable, Mapping

from weir.engine.messages import Arrival, Failure, PageBundle
from weir.kv.geometry import num_pages_for
from weir.sim.engines.exact import ExactEngine
from weir.sim.engines.fast import FastEngine
from weir.sim.engines.fast_rows import FastRow
from weir.sim.memory.page_memory import PlainMemory
from weir.sim.request_state import TOKEN, SimRequestState
from weir.sim.workers.arrival import SimArrival
from weir.sim.workers.worker import SimWorker


class SwitchingEngine:
    """Implements `weir.sim.workers.worker.Engine`, for a worker with a memory to itself."""

    def __init__(
        self, worker: SimWorker, memory: PlainMemory, fast: FastEngine, make_exact: Callable[[], ExactEngine]
    ) -> None:
        self._worker = worker
        self._memory = memory
        self._fast = fast
        self._make_exact = make_exact
        self._engine: FastEngine | ExactEngine = fast
        """In use."""
        self._num_moved = 0

    @property
    def busy_ns(self) -> int:
        return self._fast.busy_ns + (0 if self._engine is self._fast else self._engine.busy_ns)

    def add(self, arrival: SimArrival) -> None:
        self._engine.add(arrival)

    def cancel(self, state: SimRequestState) -> None:
        self._engine.cancel(state)

    def fail(self, state: SimRequestState, failure: Failure) -> None:
        self._engine.fail(state, failure)

    def forget(self, state: SimRequestState, copied: PageBundle | None) -> None:
        self._engine.forget(state, copied)

    def begin_step(self) -> int | None:
        if self._engine is self._fast and not self._fast.has_room:
            self._engine = self._go_exact()
        return self._engine.begin_step()

    def end_step(self) -> None:
        self._engine.end_step()

    @property
    def max_step_tokens(self) -> int:
        return self._engine.max_step_tokens

    @property
    def next_deadline_s(self) -> float | None:
        return self._engine.next_deadline_s

    @property
    def num_running(self) -> int:
        return self._engine.num_running

    @property
    def num_waiting(self) -> int:
        return self._engine.num_waiting

    def counters(self) -> Mapping[str, float]:
        totals = dict(self._fast.counters())
        if self._engine is not self._fast:
            for name, value in self._engine.counters().items():
                totals[name] = totals.get(name, 0.0) + value
            totals["taken_over"] -= self._num_moved
        return totals

    def integrity_errors(self) -> list[str]:
        return self._engine.integrity_errors()

    def give_memory_back(self) -> None:
        self._engine.give_memory_back()

    def settle_all(self) -> None:
        self._engine.settle_all()

    def die(self) -> None:
        self._engine.die()

    def _go_exact(self) -> ExactEngine:
        """Everything moves: sequences with pages that have ids from here on, in the order in which they came."""
        self._fast.settle_all()
        self._fast.die()
        self._memory.release_all(self._worker.index)
        rows = [(self._moved(row), row.num_passed_over) for row in self._fast.rows.values()]
        exact = self._make_exact()
        for arrival, num_passed_over in rows:
            exact.go_on(arrival, num_passed_over)
        return exact

    def _moved(self, row: FastRow) -> Arrival:
        """As the batcher takes a sequence that has begun elsewhere."""
        if row.is_waiting:
            return row.arrival.for_batcher(self._memory)
        num_prompt_tokens = row.num_prompt_tokens
        num_tokens = row.context(self._fast.num_done_steps + 1) if row.first_step else num_prompt_tokens
        num_computed = num_tokens - 1 if row.first_step else row.num_computed
        num_pages = max(row.num_prompt_pages, num_pages_for(num_computed))
        bundle = self._memory.try_acquire(self._worker.index, num_pages, 1)
        assert bundle is not None, "these pages are in use, and a memory has twice as many slots as sequences run"
        slot = bundle.slots[0]
        params, record = row.state.params(), self._memory.records[slot]
        record.begin(params)
        self._num_moved += 1
        return Arrival(
            params,
            slot=slot,
            log=record,
            output_token_ids=(TOKEN,) * (num_tokens - num_prompt_tokens),
            block_table=bundle.page_ids,
            num_computed_tokens=num_computed,
        )

"""Goes over from the fast engine to the real batcher before it matters, and back when nothing is left to do."""

from collections.abc import Callable, Mapping

from weir.engine.messages import Arrival, Failure, PageBundle
from weir.kv.geometry import num_pages_for
from weir.sim.call import TOKEN, SimRequestState
from weir.sim.engines.exact import ExactEngine
from weir.sim.engines.fast import FastEngine
from weir.sim.engines.fast_pages import FastPages
from weir.sim.engines.fast_rows import FastRow
from weir.sim.workers.arriving import SimArrival


class SwitchingEngine:
    """Implements `weir.sim.workers.worker.Engine`."""

    def __init__(
        self, fast: FastEngine, pages: FastPages, make_exact: Callable[[], ExactEngine], *, may_look_ahead: bool
    ) -> None:
        self._may_look_ahead = may_look_ahead
        self._fast = fast
        self._pages = pages
        self._make_exact = make_exact
        self._exact: ExactEngine | None = None
        """None: the fast one is in use."""
        self._retired: list[ExactEngine] = []
        self._lane_priority: int | None = None
        self._num_moved = 0
        pages.open()

    @property
    def busy_ns(self) -> int:
        return self._fast.busy_ns + sum(engine.busy_ns for engine in self._all_exact())

    def add(self, arrival: SimArrival) -> None:
        if self._exact is not None and self._exact.is_idle:
            self._go_fast(self._exact)
        if self._exact is None and not self._fast.rows:
            self._lane_priority = arrival.call.lane_priority
        if self._exact is None and arrival.call.lane_priority != self._lane_priority:
            self._go_exact()
        if self._exact is not None:
            self._exact.add(arrival)
        else:
            self._fast.add(arrival)

    def cancel(self, call: SimRequestState) -> None:
        (self._exact or self._fast).cancel(call)

    def fail(self, call: SimRequestState, failure: Failure) -> None:
        self._go_exact().fail(call, failure)

    def forget(self, call: SimRequestState, copied: PageBundle | None) -> None:
        self._go_exact().forget(call, copied)

    def begin_step(self) -> int | None:
        if self._exact is None and not self._fast.has_room:
            self._go_exact()
        return (self._exact or self._fast).begin_step()

    def end_step(self) -> None:
        (self._exact or self._fast).end_step()

    def look_ahead(self, ends_ns: int) -> int:
        return self._fast.look_ahead(ends_ns) if self._exact is None and self._may_look_ahead else ends_ns

    def catch_up(self) -> int:
        return self._fast.catch_up()

    @property
    def max_step_tokens(self) -> int:
        return (self._exact or self._fast).max_step_tokens

    @property
    def next_deadline_s(self) -> float | None:
        return None if self._exact is None else self._exact.next_deadline_s

    @property
    def num_running(self) -> int:
        return (self._exact or self._fast).num_running

    @property
    def num_waiting(self) -> int:
        return (self._exact or self._fast).num_waiting

    def counters(self) -> Mapping[str, float]:
        totals = {name: float(value) for name, value in self._fast.counters().items()}
        for engine in self._all_exact():
            for name, value in engine.counters().items():
                totals[name] = totals.get(name, 0.0) + value
        totals["taken_over"] -= self._num_moved
        return totals

    def integrity_errors(self) -> list[str]:
        errors = [] if self._exact is None else self._exact.integrity_errors()
        if self._fast.rows:
            errors.append(f"{len(self._fast.rows)} sequences are here when all requests have ended")
        return errors

    def give_memory_back(self) -> None:
        if self._exact is None:
            self._pages.close()
        else:
            self._exact.give_memory_back()

    def settle_all(self) -> None:
        """Tells what every sequence has drawn so far."""
        if self._exact is None:
            self._fast.settle_all()

    def die(self) -> None:
        self._fast.forget_all()

    def _all_exact(self) -> list[ExactEngine]:
        return self._retired if self._exact is None else [*self._retired, self._exact]

    def _go_fast(self, exact: ExactEngine) -> None:
        exact.give_memory_back()
        self._retired.append(exact)
        self._exact = None
        self._pages.open()

    def _go_exact(self) -> ExactEngine:
        """Everything moves: sequences with their pages named, in the order in which they came."""
        if self._exact is not None:
            return self._exact
        self._fast.settle_all()
        rows = [(self._moved(row), row.num_passed_over) for row in self._fast.rows.values()]
        self._fast.forget_all()
        self._pages.close()
        exact = self._exact = self._make_exact()
        for arrival, num_passed_over in rows:
            exact.go_on(arrival, num_passed_over)
        return exact

    def _moved(self, row: FastRow) -> Arrival:
        """As the batcher takes a sequence that has begun elsewhere."""
        if row.is_waiting:
            self._num_moved += row.arrival.slot is not None
            return row.arrival.for_batcher(self._pages.memory)
        num_prompt_tokens = row.num_prompt_tokens
        num_tokens = row.context(self._fast.num_done_steps + 1) if row.first_step else num_prompt_tokens
        num_computed = num_tokens - 1 if row.first_step else row.num_computed
        num_pages = max(row.num_prompt_pages, num_pages_for(num_computed))
        pages = self._pages.name(num_pages - len(row.arrival.page_ids))
        slot = self._pages.take_slot() if row.arrival.slot is None else row.arrival.slot
        params, record = row.call.params(), self._pages.memory.records[slot]
        record.begin(params)
        self._num_moved += 1
        return Arrival(
            params,
            slot=slot,
            log=record,
            output_token_ids=(TOKEN,) * (num_tokens - num_prompt_tokens),
            block_table=(*row.arrival.page_ids, *pages),
            num_computed_tokens=num_computed,
        )

"""The batcher of real workers, over modelled steps."""

from collections.abc import Mapping

from weir.core.cost import PromptChunk, StepCost
from weir.engine.batching.batcher import Batcher
from weir.engine.messages import Arrival, Failure, PageBundle, PagesWanted, SequenceKey, SetBounds
from weir.engine.plan import StepPlan, StepResult
from weir.sim.request_state import LAST_TOKEN, TOKEN, RequestStates, SimRequestState
from weir.sim.timeline import Timeline, ns_of_ms
from weir.sim.worker import SimArrival, SimWorker, WorkerListener


class ExactEngine:
    """Implements `weir.sim.worker.Engine`. `owns_memory`: no other worker uses the memory, and it
    keeps no prefixes, so all of it is in the batcher's pool."""

    def __init__(
        self,
        worker: SimWorker,
        batcher: Batcher,
        cost: StepCost,
        states: RequestStates,
        timeline: Timeline,
        listener: WorkerListener,
        *,
        owns_memory: bool,
    ) -> None:
        self.busy_ns = 0
        self._worker = worker
        self._memory = worker.memory
        self._batcher = batcher
        self._cost = cost
        self._states = states
        self._timeline = timeline
        self._listener = listener
        self._owns_memory = owns_memory
        self._plan: StepPlan | None = None
        if owns_memory:
            self._take_all_memory()

    def add(self, arrival: SimArrival) -> None:
        self._batcher.add(arrival.for_batcher(self._memory))

    def go_on(self, arrival: Arrival, num_passed_over: int) -> None:
        """With a sequence that has begun in this worker; its prompt got nothing in so many steps before."""
        counters = self._batcher.counters
        num_taken_over = counters.taken_over
        self._batcher.add(arrival)
        counters.taken_over = num_taken_over  # it comes from no other worker
        key = SequenceKey(arrival.params.request_id, arrival.params.attempt)
        self._batcher.note_passed_over(key, num_passed_over)

    def cancel(self, state: SimRequestState) -> None:
        self._batcher.cancel(state.key)

    def cancel_attempt(self, key: SequenceKey) -> None:
        """An older one of a request that goes on elsewhere."""
        self._batcher.cancel(key)

    def fail(self, state: SimRequestState, failure: Failure) -> None:
        self._batcher.fail(state.key, failure)

    def forget(self, state: SimRequestState, copied: PageBundle | None) -> None:
        self._batcher.forget(state.key)
        if copied is not None:
            self._return(copied)

    def set_bounds(self, bounds: SetBounds) -> None:
        self._batcher.set_bounds(bounds)

    def begin_step(self) -> int | None:
        self._return(self._batcher.pool.take_used())  # of what was cancelled
        self._supply()
        plan = self._batcher.decide(self._timeline.now_s())
        if plan is None and self._supply():  # who has just joined lacked a page, and pages come at once
            plan = self._batcher.decide(self._timeline.now_s())
        self._plan = plan
        self._report()
        if plan is None:
            return None
        duration_ns = ns_of_ms(self._cost_ms(plan))
        self.busy_ns += duration_ns
        return duration_ns

    def end_step(self) -> None:
        plan = self._plan
        assert plan is not None, "a step was begun"
        self._batcher.record(plan, self._sample(plan), now_s=self._timeline.now_s())
        self._report()

    @property
    def next_deadline_s(self) -> float | None:
        return self._batcher.next_deadline_s

    @property
    def num_running(self) -> int:
        return self._batcher.load.num_running

    @property
    def num_waiting(self) -> int:
        return self._batcher.load.num_waiting

    @property
    def max_step_tokens(self) -> int:
        return self._batcher.pace.num_tokens

    def settle_all(self) -> None:
        """It has reported everything."""

    def die(self) -> None:
        """Nobody asks it for anything any more."""

    def counters(self) -> Mapping[str, float]:
        return {name: float(value) for name, value in self._batcher.counters.snapshot().items()}

    def integrity_errors(self) -> list[str]:
        errors = list(self._batcher.check_integrity())
        if not self._batcher.is_idle:
            errors.append("has sequences when all requests have ended")
        return errors

    def give_memory_back(self) -> None:
        self._release(self._batcher.pool.take_all_free())

    def _report(self) -> None:
        if self._batcher.has_events:
            self._listener.on_events(self._worker, self._batcher.take_events())
        self._return(self._batcher.pool.take_used() if self._owns_memory else self._batcher.take_surplus())

    def _return(self, bundle: PageBundle) -> None:
        if not bundle:
            return
        self._release(bundle)
        if self._owns_memory:
            self._take_all_memory()
        else:
            self._listener.on_pages_free(self._memory)

    def _cost_ms(self, plan: StepPlan) -> float:
        """A chunk of one token is a decode, as `weir profile` counts them."""
        chunks, num_decodes, num_context_tokens = [], 0, 0
        for chunk in plan.chunks:
            num_tokens = len(chunk.token_ids)
            if num_tokens == 1:
                num_decodes += 1
                num_context_tokens += chunk.start + 1
            else:
                chunks.append(PromptChunk(num_tokens, chunk.start))
        return self._cost.step_ms(chunks, num_decodes, num_context_tokens)

    def _sample(self, plan: StepPlan) -> StepResult:
        token_ids = {}
        records, states = self._memory.records, self._states
        for chunk in plan.chunks:
            sample, slot = chunk.sample, chunk.slot
            if sample is None:
                continue
            params = records[slot].params
            # A row that a static batch holds after its end belongs to nobody.
            is_last = params is not None and sample.output_index + 1 == states[params.request_id].num_true_tokens
            token_ids[slot] = LAST_TOKEN if is_last else TOKEN
        return StepResult(token_ids)

    def _supply(self) -> bool:
        """Whether there was anything to give."""
        wanted = None if self._owns_memory else self._batcher.wanted()
        bundle = None if wanted is None else self._try_acquire(wanted)
        if bundle is None:
            return False
        self._batcher.pool.give(bundle)
        return True

    def _try_acquire(self, wanted: PagesWanted) -> PageBundle | None:
        index = self._worker.index
        bundle = self._memory.try_acquire(index, wanted.num_pages, wanted.num_slots)
        return bundle or self._memory.try_acquire(index, wanted.least_pages, wanted.least_slots)

    def _take_all_memory(self) -> None:
        self._batcher.pool.give(self._memory.take_all(self._worker.index))

    def _release(self, bundle: PageBundle) -> None:
        hashes = []
        for used in bundle.used:
            state = self._states[used.prefix_seed.decode()] if used.prefix_seed else None
            hashes.append(() if state is None else state.hashes[: len(used.token_ids) // 16])
        self._memory.release(self._worker.index, bundle, hashes)

"""The workers of a simulated system: made by the spec, started on prompts, joined by hand-offs, killed on time."""

from dataclasses import dataclass, replace

from weir.bus.messages import Placement, WorkerRecord
from weir.bus.migration import Migrate
from weir.engine.counters import EngineCounters
from weir.engine.messages import ChunkComputed, Event, HandOffReady, SequenceEnded, SetBounds, TokenSampled
from weir.kv.geometry import PAGE_TOKENS
from weir.sim.cores import SharedCores
from weir.sim.engines.make import EngineMaker
from weir.sim.exchange import SimExchange, order_of
from weir.sim.gateway import MODEL, SimGateway
from weir.sim.hand_offs import SimHandOffs
from weir.sim.memory import Location, PrefixMemory, SimPageMemory, locations_of
from weir.sim.migrating import SimMigrations, is_moved
from weir.sim.prefix_events import SimPrefixEvents
from weir.sim.request_state import SimRequestState
from weir.sim.scheduler import RECORD_EVERY_S, SimScheduler
from weir.sim.spec import FailureSpec, SystemSpec
from weir.sim.timeline import NS_PER_S, Timeline, ns_of_ms, ns_of_s
from weir.sim.worker import Engine, SimArrival, SimWorker


@dataclass(frozen=True, slots=True)
class _Known:
    """A registry entry, and what of a worker it was made from."""

    location: Location
    load: tuple[int, int, int, bool]
    record: WorkerRecord


class Fleet:
    """Implements `weir.sim.worker.WorkerListener`."""

    def __init__(
        self,
        spec: SystemSpec,
        timeline: Timeline,
        engines: EngineMaker,
        gateway: SimGateway,
        scheduler: SimScheduler,
        *,
        keeps_prefixes: bool,
    ) -> None:
        self.on_token = gateway.on_token
        self.on_tokens = gateway.on_tokens
        self.on_gaps = gateway.on_gaps
        self._spec = spec
        self._timeline = timeline
        self._engines = engines
        self._locations = locations_of(spec, keeps_prefixes=keeps_prefixes)
        self._memories = {location.arena_id: location.memory for location in self._locations.values()}
        self._prefix_events = [
            SimPrefixEvents(arena_id, memory, timeline, scheduler)
            for arena_id, memory in self._memories.items()
            if isinstance(memory, PrefixMemory)
        ]
        self._cores = SharedCores(timeline) if spec.shares_cores else None
        self._workers: dict[str, SimWorker] = {}
        self._all: list[SimWorker] = []
        self._records: dict[str, _Known] = {}
        self._draining: set[str] = set()
        self._left_behind: list[str] = []
        """By workers that ended in order."""
        self._gateway = gateway
        self._scheduler = scheduler
        self._hand_offs = SimHandOffs(spec, timeline, self._lose)
        self._exchange = None if spec.host_link is None else SimExchange(spec, timeline)
        self._migrations = SimMigrations(timeline, self._exchange, gateway, scheduler, self._workers, self._locations)
        self._is_stopped = False

    def begin(self) -> None:
        """All workers are there."""
        for location in self._locations.values():
            self._report(location, self._make(location))
        for events in self._prefix_events:
            events.report()
        for failure in self._spec.failures:
            self._plan_failure(failure)

    def add(self, location: Location) -> None:
        """A worker more, which serves from now on. With a link alone, where each has a memory to itself."""
        self._locations[location.worker_id] = location
        self._memories[location.arena_id] = location.memory
        self._report(location, self._make(location))
        if isinstance(location.memory, PrefixMemory):
            events = SimPrefixEvents(location.arena_id, location.memory, self._timeline, self._scheduler)
            self._prefix_events.append(events)
            events.report()

    def location(self, worker_id: str) -> Location:
        """Of one that is or was there."""
        return self._locations[worker_id]

    def drain(self, worker_id: str) -> None:
        """It gets nothing new, and ends what it has."""
        self._draining.add(worker_id)
        self._scheduler.worker_seen(self._record(self._locations[worker_id], self._workers[worker_id]))

    def set_bounds(self, worker_id: str, bounds: SetBounds) -> None:
        """From its next step on, and the scheduler hears of it at once. Of real batchers alone."""
        location = self._locations[worker_id]
        num_seqs, num_tokens = bounds.max_num_seqs, bounds.max_num_batched_tokens
        pool = replace(location.pool, max_num_seqs=num_seqs, max_num_batched_tokens=num_tokens)
        self._locations[worker_id] = replace(location, pool=pool)
        worker = self._workers[worker_id]
        worker.post(lambda engine: engine.set_bounds(bounds))
        self._scheduler.worker_seen(self._record(self._locations[worker_id], worker))

    def worker(self, worker_id: str) -> SimWorker:
        return self._workers[worker_id]

    def is_empty(self, worker_id: str) -> bool:
        """As far as the worker itself knows: something may be on its way to it."""
        return self._workers[worker_id].is_idle

    def retire(self, worker_id: str) -> None:
        """An empty worker ends in order."""
        worker = self._workers.pop(worker_id)
        self._left_behind += [f"{worker_id}: {error}" for error in worker.engine.integrity_errors()]
        worker.engine.give_memory_back()
        worker.die()
        self._draining.discard(worker_id)
        self._scheduler.worker_gone(worker_id)

    def stop(self) -> None:
        """Nothing is reported any more."""
        self._is_stopped = True
        for events in self._prefix_events:
            events.stop()

    def start(self, state: SimRequestState) -> None:
        """A Start has come to its worker."""
        placement = state.placement
        assert placement is not None, "only a granted request is started"
        if state.is_over:
            return
        if not placement.prefix_source or not self._try_bring(state, placement):
            self._begin(state)

    def _begin(self, state: SimRequestState) -> None:
        placement = state.placement
        assert placement is not None, "only a granted request is started"
        if state.is_over:
            return
        worker = self._workers.get(placement.prefill_worker_id)
        if worker is None:
            self._lose(state)
            return
        # At least the last token is computed, for its logits.
        pages = worker.memory.match(worker.index, state.hashes[: (state.request.num_prompt_tokens - 1) // PAGE_TOKENS])
        if state.order is None:
            state.outcome.num_cached_tokens = len(pages) * PAGE_TOKENS
        state.num_sealed_pages = len(pages)
        arrival = SimArrival(state, page_ids=pages)
        worker.post(lambda engine: engine.add(arrival))

    def _try_bring(self, state: SimRequestState, placement: Placement) -> bool:
        """Has its prefix come from another host, computed there for it if so placed; it starts when that is over."""
        location = self._locations[placement.prefill_worker_id]
        source = placement.prefix_source.partition(":")[0]
        hashes = state.hashes[: (state.request.num_prompt_tokens - 1) // PAGE_TOKENS]
        assert self._exchange is not None, "only hosts exchange prefixes"
        assert isinstance(location.memory, PrefixMemory), "hosts keep prefixes"
        incoming = self._exchange.try_reserve(
            source, location.host_id, location.memory, hashes, lambda: self._begin(state)
        )
        if incoming is None:
            return False
        memory = self._memories[source]
        assert isinstance(memory, PrefixMemory), "hosts keep prefixes"
        exchange, sender = self._exchange, self._workers.get(placement.prefix_worker_id)
        exchange.send(incoming, memory.num_cached(hashes), sender is None)
        if sender is None:
            return True
        order = order_of(state, placement, hashes, lambda num, is_last: exchange.send(incoming, num, is_last))
        self._gateway.states[order.request.request_id] = state.order = order
        pages = sender.memory.match(sender.index, order.hashes[:-1])
        order.num_sealed_pages = len(pages)
        state.outcome.num_cached_tokens = len(pages) * PAGE_TOKENS
        arrival = SimArrival(order, page_ids=pages)
        sender.post(lambda engine: engine.add(arrival))
        return True

    def migrate(self, migrate: Migrate) -> None:
        """A gateway is asked to."""
        self._migrations.begin(migrate, self._gateway.states[migrate.request_id])

    def cancel(self, state: SimRequestState) -> None:
        """The request is not wanted any more."""
        placement = state.placement
        assert placement is not None, "only a granted request is cancelled at workers"
        for worker_id in dict.fromkeys((placement.prefill_worker_id, placement.decode_worker_id)):
            worker = self._workers.get(worker_id)
            if worker is not None:
                worker.post(lambda engine: engine.cancel(state))
        order = state.order
        if order is not None and not order.is_over:
            _end_order(order)
            sender = self._workers.get(placement.prefix_worker_id)
            if sender is not None:
                sender.post(lambda engine: engine.cancel(order))

    def on_events(self, worker: SimWorker, events: tuple[Event, ...]) -> None:
        states, on_token = self._gateway.states, self._gateway.on_token
        for event in events:
            if event.__class__ is TokenSampled:  # nearly all are
                state = states[event.key.request_id]
                if is_moved(state, event.key):
                    continue
                if state.on_computed is None:
                    on_token(state, is_last=event.index + 1 == state.num_true_tokens)
                else:  # its last chunk may be reported behind it
                    self._timeline.after(0, lambda order=state: _end_order(order))  # type: ignore[misc]
                continue
            match event:
                case ChunkComputed(key) if (state := states[key.request_id]).hashes and not is_moved(state, key):
                    _seal(worker, states[event.key.request_id], event)
                case HandOffReady():
                    self._hand_over(worker, event)
                case SequenceEnded(key, _, failure) if failure is not None:
                    self._fail(states[key.request_id], failure.reason.value)
                case _:
                    pass

    def on_pages_free(self, memory: SimPageMemory) -> None:
        self._hand_offs.retry(memory)
        for worker in self._workers.values():
            if worker.memory is memory:
                worker.wake()

    def settle_all(self) -> None:
        """Engines report what was sampled so far."""
        for worker in self._workers.values():
            worker.engine.settle_all()

    @property
    def busy_ns(self) -> int:
        """All steps that were ever begun, summed."""
        return sum(worker.busy_ns for worker in self._all)

    def counters(self) -> dict[str, float]:
        """Summed over all workers that there ever were."""
        totals = dict.fromkeys(EngineCounters().snapshot(), 0.0)
        for worker in self._all:
            for name, value in (item for engine in worker.engines for item in engine.counters().items()):
                totals[name] = totals.get(name, 0.0) + value
            totals["busy_s"] = totals.get("busy_s", 0.0) + worker.busy_ns / NS_PER_S
        totals.pop("page_fingerprint", None)
        exchanged = {} if self._exchange is None else self._exchange.counters()
        return totals | self._hand_offs.counters() | exchanged | self._migrations.counters()

    def note_preemptions(self) -> None:
        """In the outcomes, at the end of a run."""
        for memory in self._memories.values():
            for request_id, num_preemptions in memory.preemptions.items():
                self._gateway.states[request_id].outcome.num_preemptions += num_preemptions

    def integrity_errors(self) -> list[str]:
        """What is not back where it belongs when all requests have ended."""
        errors = list(self._left_behind)
        for worker in self._workers.values():
            errors += [f"{worker.worker_id}: {error}" for error in worker.engine.integrity_errors()]
            worker.engine.give_memory_back()
        for arena_id, memory in self._memories.items():
            errors += [f"memory of {arena_id}: {error}" for error in memory.integrity_errors()]
        return errors + self._hand_offs.integrity_errors()

    def _make(self, location: Location) -> SimWorker:
        pool, index = location.pool, len(self._all) + 1
        cores = None if pool.role == "local" else self._cores
        contention = pool.profile.contention
        worker = SimWorker(location.worker_id, index, location.memory, self._timeline, cores, contention)
        worker.drive(self._engines.make(worker, location, self._gateway.states, self))
        self._workers[location.worker_id] = worker
        self._all.append(worker)
        return worker

    def _report(self, location: Location, worker: SimWorker) -> None:
        """Its registry entry, every second while it lives."""
        if self._is_stopped or not worker.is_alive:
            return
        self._scheduler.worker_seen(self._record(self._locations[location.worker_id], worker))
        self._timeline.after(ns_of_s(RECORD_EVERY_S), lambda: self._report(location, worker))

    def _record(self, location: Location, worker: SimWorker) -> WorkerRecord:
        """The same one as before where it would say the same: of a large fleet most workers are idle."""
        engine, is_draining = worker.engine, location.worker_id in self._draining
        load = (engine.num_running, engine.num_waiting, engine.max_step_tokens, is_draining)
        known = self._records.get(location.worker_id)
        if known is None or known.location is not location or known.load != load:
            known = _Known(location, load, self._make_record(location, engine, is_draining=is_draining))
            self._records[location.worker_id] = known
        return known.record

    def _make_record(self, location: Location, engine: Engine, *, is_draining: bool) -> WorkerRecord:
        pool = location.pool
        return WorkerRecord(
            worker_id=location.worker_id,
            role="prefill" if pool.role == "prefill" else "decode",
            model=MODEL,
            address=f"{location.worker_id}:1",
            host_id=location.host_id,
            max_context_tokens=pool.max_context_tokens,
            page_tokens=PAGE_TOKENS,
            num_arena_pages=location.num_host_pages,
            max_num_seqs=pool.max_num_seqs,
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            group=pool.group,
            serves_locally=pool.role == "local" or pool.serves_locally,
            max_num_batched_tokens=engine.max_step_tokens,
            num_own_pages=location.num_own_pages,
            cost=pool.profile.step,
            pages_address=f"{location.host_id}:1" if self._exchange is not None else "",
            page_bytes=pool.profile.kv_bytes_per_token * PAGE_TOKENS,
            is_draining=is_draining,
        )

    def _hand_over(self, worker: SimWorker, ready: HandOffReady) -> None:
        state = self._gateway.states[ready.key.request_id]
        assert state.placement is not None, "only a granted request is handed off"
        receiver = self._workers.get(state.placement.decode_worker_id)
        if receiver is None:
            self._lose(state)
            self._hand_offs.refuse(worker, state)
            return
        delay_ns = ns_of_ms(self._locations[worker.worker_id].pool.profile.hand_off_ms)
        self._hand_offs.begin(worker, receiver, ready, state, delay_ns)

    def _lose(self, state: SimRequestState) -> None:
        self._fail(state, "worker_lost")

    def _fail(self, state: SimRequestState, reason: str) -> None:
        if state.on_computed is None:
            self._gateway.on_failure(state, reason)
        else:
            _end_order(state)

    def _plan_failure(self, failure: FailureSpec) -> None:
        start_ns = self._timeline.start_ns
        self._timeline.at(start_ns + ns_of_s(failure.dies_at_s), lambda: self._kill(failure.worker_id))
        if failure.returns_at_s < float("inf"):
            location = self._locations[failure.worker_id]
            self._timeline.at(start_ns + ns_of_s(failure.returns_at_s), lambda: self._return(location))

    def _return(self, location: Location) -> None:
        self._report(location, self._make(location))

    def _kill(self, worker_id: str) -> None:
        """Gateways see the stream break; the scheduler misses its registry entry when that is due."""
        worker = self._workers.pop(worker_id)
        worker.engine.settle_all()
        worker.die()
        self._hand_offs.forget_worker(worker)
        for state in self._gateway.states.values():
            placement = state.placement
            if not state.is_over and placement is not None:
                is_there = placement.decode_worker_id == worker_id or (
                    placement.prefill_worker_id == worker_id and state.outcome.first_token_s is None
                )
                if is_there:
                    self._lose(state)


def _seal(worker: SimWorker, state: SimRequestState, chunk: ChunkComputed) -> None:
    """As `weir.worker.arena.prefixes` does it after each chunk: others may go on from here."""
    first, end = state.num_sealed_pages, min((chunk.start + chunk.num_tokens) // PAGE_TOKENS, len(state.hashes))
    if end > first:
        state.num_sealed_pages = end
        worker.memory.seal(worker.index, chunk.page_ids[first:end], state.hashes[first:end])
        if state.on_computed is not None:
            state.on_computed(end, False)


def _end_order(order: SimRequestState) -> None:
    """What it computed for another host is there now, or will never be."""
    order.is_over = True
    if order.on_computed is not None:
        order.on_computed(0, True)

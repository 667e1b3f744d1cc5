"""Sequences of a simulated system that go on at another host, as gateways and transfer services have them do it.

asked ─> pages cross while it goes on ─> those that it filled meanwhile ─> none is missing: it goes on there
           └─ no room, preempted, a worker is gone, too late ─> it goes on where it is

What is behind its last full page is computed again there. Real gateways switch just after a page is full, so that it is
less than here.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from weir.bus.messages import HeldRequest, Placement
from weir.bus.migration import Migrate
from weir.engine.messages import SequenceKey
from weir.kv.geometry import PAGE_TOKENS
from weir.sim.engines.exact import ExactEngine
from weir.sim.exchange import SimExchange
from weir.sim.gateway import SimGateway, submit_of
from weir.sim.memory import Location, PrefixMemory
from weir.sim.request_state import SimRequestState
from weir.sim.scheduler import SimScheduler
from weir.sim.timeline import Timeline, ns_of_ms, ns_of_s
from weir.sim.worker import SimArrival, SimWorker

_LONGEST_NS = ns_of_s(8.0)
_REPORTED_AFTER_NS = ns_of_s(1.0)
"""What a gateway gives up, its next list of held requests says."""


@dataclass(slots=True, eq=False)
class _Staging:
    """Of one request: what has come of its pages so far, reserved there, behind `num_here` that were there."""

    state: SimRequestState
    source: Placement
    placement: Placement
    memory: PrefixMemory
    began_ns: int
    num_here: int = 0
    page_ids: list[int] = field(default_factory=list)

    @property
    def num_pages(self) -> int:
        return self.num_here + len(self.page_ids)


class SimMigrations:
    """`exchange` None: hosts without links have nothing go on elsewhere. `workers`, `locations`: those of the fleet, as
    they come and go."""

    def __init__(
        self,
        timeline: Timeline,
        exchange: SimExchange | None,
        gateway: SimGateway,
        scheduler: SimScheduler,
        workers: Mapping[str, SimWorker],
        locations: Mapping[str, Location],
    ) -> None:
        self._timeline = timeline
        self._exchange = exchange
        self._gateway = gateway
        self._scheduler = scheduler
        self._workers = workers
        self._locations = locations
        self._under_way: set[str] = set()
        self._dispatches: dict[str, int] = {}
        """The last number that a request's dispatch had, begun or not."""
        self._counts: Counter[str] = Counter()

    def begin(self, migrate: Migrate, state: SimRequestState) -> None:
        """The Migrate is at the gateway."""
        request_id, profile = migrate.request_id, self._locations[migrate.placement.decode_worker_id].pool.profile
        is_decoding = not state.is_over and state.outcome.first_token_s is not None
        accepted = is_decoding and request_id not in self._under_way and state.placement is not None
        self._timeline.after(
            ns_of_ms(profile.bus_ms),
            lambda: self._scheduler.migration_answered(request_id, migrate.placement, accepted=accepted),
        )
        memory = self._locations[migrate.placement.decode_worker_id].memory
        if not accepted or state.placement is None or not isinstance(memory, PrefixMemory):
            return
        dispatch = self._dispatches.get(request_id, state.placement.dispatch) + 1
        self._dispatches[request_id] = dispatch
        self._under_way.add(request_id)
        placement = replace(migrate.placement, dispatch=dispatch)
        staging = _Staging(state, state.placement, placement, memory, self._timeline.now_ns)
        self._timeline.after(ns_of_ms(profile.stream_ms), lambda: self._stage(staging))

    def counters(self) -> dict[str, float]:
        """Of the gateway."""
        return {f"migrations_{name}": float(self._counts[name]) for name in ("moved", "abandoned")}

    def _stage(self, staging: _Staging) -> None:
        """What was sent has come: sends what is missing, or has it go on there."""
        state, receiver = staging.state, self._workers.get(staging.placement.decode_worker_id)
        num_full = self._num_full_pages(staging)
        is_late = self._timeline.now_ns - staging.began_ns > _LONGEST_NS
        if state.is_over or state.placement != staging.source or receiver is None or num_full == 0 or is_late:
            self._abandon(staging)
            return
        state.hashes = _hashes_of(state, num_full)
        if not staging.page_ids:
            staging.num_here = staging.memory.num_cached(state.hashes[:num_full])
        num_missing = num_full - staging.num_pages
        if num_missing <= 0:
            self._switch(staging, receiver)
            return
        page_ids = staging.memory.try_reserve(num_missing)
        if page_ids is None:
            self._abandon(staging)
            return
        assert self._exchange is not None, "only hosts with links are asked to"
        staging.page_ids += page_ids
        source, receiver_host = (
            self._locations[one.decode_worker_id].host_id for one in (staging.source, staging.placement)
        )
        arrives_ns = self._exchange.transfer(source, receiver_host, num_missing * PAGE_TOKENS)
        self._timeline.at(arrives_ns, lambda: self._stage(staging))

    def _num_full_pages(self, staging: _Staging) -> int:
        """That it has where it runs, of what its gateway knows; 0: it has none now."""
        state, worker = staging.state, self._workers.get(staging.source.decode_worker_id)
        num_tokens = state.request.num_prompt_tokens + state.outcome.num_output_tokens
        for record in () if worker is None else worker.memory.records:
            if record.params is not None and SequenceKey.of(record.params) == state.key:
                return min(num_tokens - 1, record.num_computed_tokens) // PAGE_TOKENS
        return 0

    def _switch(self, staging: _Staging, receiver: SimWorker) -> None:
        state, old_key = staging.state, staging.state.key
        state.placement = staging.placement
        sender = self._workers.get(staging.source.decode_worker_id)
        stream_ns = ns_of_ms(self._locations[staging.placement.decode_worker_id].pool.profile.stream_ms)
        if sender is not None:
            self._timeline.after(stream_ns, lambda: _cancel(sender, old_key))
        self._timeline.after(stream_ns, lambda: self._go_on(staging, receiver))

    def _go_on(self, staging: _Staging, receiver: SimWorker) -> None:
        state, num_pages = staging.state, staging.num_pages
        self._settle(staging, num_pages)
        self._counts["moved"] += 1
        if state.is_over:
            return
        if not receiver.is_alive:
            self._gateway.on_failure(state, "worker_lost")
            return
        pages = receiver.memory.match(receiver.index, state.hashes[:num_pages])
        state.num_sealed_pages = len(pages)
        arrival = SimArrival(state, page_ids=pages, num_output_tokens=state.outcome.num_output_tokens)
        receiver.post(lambda engine: engine.add(arrival))
        self._report(staging)

    def _abandon(self, staging: _Staging) -> None:
        self._settle(staging, 0)
        self._counts["abandoned"] += 1
        if not staging.state.is_over:
            self._timeline.after(_REPORTED_AFTER_NS, lambda: self._report(staging))

    def _settle(self, staging: _Staging, num_pages: int) -> None:
        """The first of its pages are cached there, the others free."""
        self._under_way.discard(staging.state.request.request_id)
        if staging.page_ids:
            hashes = staging.state.hashes[: staging.num_pages]
            staging.memory.settle(staging.page_ids, hashes[staging.num_here : num_pages], hashes)
        staging.page_ids = []

    def _report(self, staging: _Staging) -> None:
        """What came of it, in the gateway's list of held requests."""
        state = staging.state
        if not state.is_over and state.placement is not None:
            entry = HeldRequest(submit_of(state), state.placement, True, state.outcome.num_output_tokens)
            self._scheduler.held(entry)


def is_moved(state: SimRequestState, key: SequenceKey) -> bool:
    """Whether the attempt is one that goes on elsewhere: what comes of it is dropped."""
    return state.placement is not None and key.attempt.dispatch != state.placement.dispatch


def _cancel(worker: SimWorker, key: SequenceKey) -> None:
    engine = worker.engine
    if isinstance(engine, ExactEngine):
        worker.post(lambda _: engine.cancel_attempt(key))


def _hashes_of(state: SimRequestState, num_pages: int) -> tuple[bytes, ...]:
    """Of its first pages, those of its answer too, which no other one has."""
    name = state.request.request_id
    later = (f"{name} {page}".encode() for page in range(len(state.hashes), num_pages))
    return (*state.hashes, *(hashlib.sha256(page).digest()[:16] for page in later))

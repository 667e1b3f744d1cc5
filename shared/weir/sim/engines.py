"""Makes the engines of simulated workers: the real batchers, and the fast ones where they are their equal."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from weir.engine.batcher import Batcher, BatchLimits
from weir.engine.decode import DecodeBatcher
from weir.engine.join import Batching
from weir.engine.local import LocalBatcher
from weir.engine.pages import PagePool
from weir.engine.prefill import PrefillBatcher
from weir.engine.running import RunningSettings
from weir.policy.registry import make_policy
from weir.policy.seams import Policy
from weir.sim.call import VOCAB_SIZE, Calls
from weir.sim.events import Timeline
from weir.sim.exact_engine import ExactEngine
from weir.sim.fast_engine import FastEngine
from weir.sim.fast_pages import FastPages
from weir.sim.memory import PlainMemory
from weir.sim.places import Place
from weir.sim.spec import SystemSpec
from weir.sim.switching_engine import SwitchingEngine
from weir.sim.worker import Engine, SimWorker, WorkerListener

_NEVER_STALLED_S = 1e9
"""A simulated sequence that waits for pages waits on; what that costs is to be seen in its latency."""
_MAX_RESERVE_PAGES = 32
_RESERVE_SHARE = 128
"""As `weir.worker.reserve` has them."""


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """Its state is made anew for each of its users."""

    name: str = "fcfs"
    params: Mapping[str, float] = field(default_factory=dict)

    def make(self) -> Policy:
        return make_policy(self.name, self.params)


@dataclass(frozen=True, slots=True)
class EngineMaker:
    """`fast_forward`: fast engines where they are allowed."""

    spec: SystemSpec
    policy: PolicyChoice
    timeline: Timeline
    fast_forward: bool

    def make(self, worker: SimWorker, place: Place, calls: Calls, listener: WorkerListener) -> Engine:
        def make_exact() -> ExactEngine:
            return ExactEngine(
                worker,
                self._batcher(place),
                place.pool.profile.step,
                calls,
                self.timeline,
                listener,
                owns_memory=place.owns_memory,
            )

        if not self._may_be_fast(place):
            return make_exact()
        pages = FastPages(place.memory, worker.index, owns_memory=place.owns_memory)
        fast = FastEngine(place.pool, pages, calls, self.timeline, listener)
        return SwitchingEngine(fast, pages, make_exact, self.timeline)

    def _may_be_fast(self, place: Place) -> bool:
        policy = self.policy.make()
        is_plain = policy.gate is None and policy.step_budget is None and not policy.is_preemptive
        is_continuous = self.spec.join.batching is Batching.CONTINUOUS
        is_counted = isinstance(place.memory, PlainMemory) and place.pool.role != "prefill"
        has_target = place.pool.target_step_ms > 0
        return self.fast_forward and is_plain and is_continuous and is_counted and not has_target

    def _batcher(self, place: Place) -> Batcher:
        batcher = self._new_batcher(place)
        batcher.set_policy(self.policy.make())
        return batcher

    def _new_batcher(self, place: Place) -> Batcher:
        pool, memory = place.pool, place.memory
        limits = BatchLimits(
            max_num_seqs=pool.max_num_seqs,
            max_num_batched_tokens=pool.max_num_batched_tokens,
            chunk_tokens=pool.chunk_tokens,
            max_context_tokens=pool.max_context_tokens,
            vocab_size=VOCAB_SIZE,
            max_stall_s=_NEVER_STALLED_S,
            target_step_s=pool.target_step_ms / 1e3 or math.inf,
        )
        reserve = min(_MAX_RESERVE_PAGES, memory.num_pages // _RESERVE_SHARE)
        if place.owns_memory:
            page_pool = PagePool(reserve_pages=memory.num_pages, reserve_slots=len(memory.records))
        else:
            page_pool = PagePool(reserve_pages=reserve, reserve_slots=0)
        open_log = memory.records.__getitem__
        if pool.role == "prefill":
            return PrefillBatcher(limits, page_pool, open_log)
        settings = RunningSettings(self.spec.join, self.spec.preemption, num_arena_pages=memory.num_pages)
        if pool.role == "local" or pool.serves_locally:
            return LocalBatcher(limits, page_pool, open_log, settings)
        return DecodeBatcher(limits, page_pool, settings)

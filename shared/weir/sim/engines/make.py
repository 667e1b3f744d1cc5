"""Makes the engines of simulated workers: the real batchers, and the fast ones where they are their equal."""

import math
from dataclasses import dataclass

from weir.engine.batching.batcher import Batcher, BatchLimits
from weir.engine.batching.joining import Batching
from weir.engine.batching.prefill import PrefillBatcher
from weir.engine.batching.running import RunningBatcher, RunningSettings
from weir.engine.memory.pages import PagePool
from weir.kv.arena.watermark import watermark_pages
from weir.policy.registry import PolicySpec
from weir.sim.engines.exact import ExactEngine
from weir.sim.engines.fast import FastEngine
from weir.sim.engines.fast_prefill import FastPrefill
from weir.sim.engines.switching import SwitchingEngine
from weir.sim.memory.locations import Location
from weir.sim.memory.page_memory import PlainMemory
from weir.sim.request_state import VOCAB_SIZE, RequestStates
from weir.sim.spec import PoolSpec, SystemSpec
from weir.sim.timeline import Timeline
from weir.sim.workers.worker import Engine, SimWorker, WorkerListener

_NEVER_STALLED_S = 1e9
"""A simulated sequence that waits for pages waits on; what that costs is to be seen in its latency."""


@dataclass(frozen=True, slots=True)
class EngineMaker:
    """`fast_forward`: fast engines where they are equal to the real batchers. `fast_decode`: also in decode workers,
    into whose memory hand-offs come; those raise MemoryIsTight when they may be equal no more."""

    spec: SystemSpec
    policy: PolicySpec
    timeline: Timeline
    fast_forward: bool
    fast_decode: bool

    def make(self, worker: SimWorker, location: Location, states: RequestStates, listener: WorkerListener) -> Engine:
        def make_exact() -> ExactEngine:
            return ExactEngine(
                worker,
                self._batcher(location),
                location.pool.profile.step,
                states,
                self.timeline,
                listener,
                owns_memory=location.owns_memory,
            )

        pool, memory = location.pool, location.memory
        if not self._may_be_fast(pool) or not isinstance(memory, PlainMemory):
            return make_exact()
        if pool.role == "prefill":
            return FastPrefill(worker, pool, memory, listener)
        fast = FastEngine(pool, memory, worker.index, self.timeline, listener)
        if pool.role == "local":
            return SwitchingEngine(worker, memory, fast, make_exact)
        # More than a real batcher ever holds beyond what is in use: a page for each that decodes, and its watermark.
        memory.keep_spare(pool.max_num_seqs + 3 * watermark_pages(memory.num_pages))
        return fast

    def _may_be_fast(self, pool: PoolSpec) -> bool:
        """As far as it depends on the pool, and there is no more than one lane."""
        if not self.fast_forward or pool.target_step_ms > 0 or (pool.role != "local" and self.spec.link is None):
            return False
        if pool.role == "prefill":
            return True
        policy = self.policy.make()
        is_plain = policy.gate is None and policy.step_budget is None and not policy.is_preemptive
        is_continuous = self.spec.join.batching is Batching.CONTINUOUS
        # Prompts that join in one step may lack a page there that the pool gets for them before the next one.
        is_alone = pool.role == "local" or (self.fast_decode and not pool.serves_locally)
        return is_plain and is_continuous and is_alone

    def _batcher(self, location: Location) -> Batcher:
        batcher = self._new_batcher(location)
        batcher.set_policy(self.policy.make())
        return batcher

    def _new_batcher(self, location: Location) -> Batcher:
        pool, memory = location.pool, location.memory
        limits = BatchLimits(
            max_num_seqs=pool.max_num_seqs,
            max_num_batched_tokens=pool.max_num_batched_tokens,
            chunk_tokens=pool.chunk_tokens,
            max_context_tokens=pool.max_context_tokens,
            vocab_size=VOCAB_SIZE,
            max_stall_s=_NEVER_STALLED_S,
            target_step_s=pool.target_step_ms / 1e3 or math.inf,
        )
        if location.owns_memory:
            page_pool = PagePool(reserve_pages=memory.num_pages, reserve_slots=len(memory.records))
        else:
            page_pool = PagePool(reserve_pages=watermark_pages(memory.num_pages), reserve_slots=0)
        open_log = memory.records.__getitem__
        if pool.role == "prefill":
            return PrefillBatcher(limits, page_pool, open_log)
        settings = RunningSettings(self.spec.join, self.spec.preemption, num_arena_pages=memory.num_pages)
        return RunningBatcher(limits, page_pool, open_log, settings)

"""Makes the engines of simulated workers: the real batchers, and the fast ones where they are their equal."""

import math
from dataclasses import dataclass

from weir.engine.batching.batcher import Batcher, BatchLimits
from weir.engine.batching.decode import DecodeBatcher
from weir.engine.batching.joining import Batching
from weir.engine.batching.local import LocalBatcher
from weir.engine.batching.prefill import PrefillBatcher
from weir.engine.batching.running import RunningSettings
from weir.engine.memory.pages import PagePool
from weir.kv.arena.watermark import watermark_pages
from weir.kv.geometry import num_pages_for
from weir.policy.registry import PolicySpec
from weir.sim.call import VOCAB_SIZE, Calls
from weir.sim.engines.exact import ExactEngine
from weir.sim.engines.fast import FastEngine
from weir.sim.engines.fast_pages import FastPages
from weir.sim.engines.fast_prefill import CountedRoom, FastPrefill, NamedRoom
from weir.sim.engines.switching import SwitchingEngine
from weir.sim.events import Timeline
from weir.sim.memory.page_memory import PlainMemory
from weir.sim.memory.places import Place
from weir.sim.spec import PoolSpec, SystemSpec
from weir.sim.workers.worker import Engine, SimWorker, WorkerListener

_NEVER_STALLED_S = 1e9
"""A simulated sequence that waits for pages waits on; what that costs is to be seen in its latency."""


@dataclass(frozen=True, slots=True)
class EngineMaker:
    """`fast_forward`: fast engines where they are their equal. `shares_fast`: also on memories that several use, which
    raise MemoryIsTight when they are so no more. `looks_ahead`: they do not plan each of their steps, and raise
    Coincidence where it cannot be told without that what comes first."""

    spec: SystemSpec
    policy: PolicySpec
    timeline: Timeline
    fast_forward: bool
    shares_fast: bool
    looks_ahead: bool
    longest_prompt_tokens: int

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

        memory = place.memory
        if not (self.fast_forward and isinstance(memory, PlainMemory) and (place.owns_memory or self.shares_fast)):
            return make_exact()
        if not place.owns_memory and any(map(self._may_be_fast, self.spec.pools)):
            memory.keep_spare(place.worker_id, self._num_stock_pages(place))
        if not self._may_be_fast(place.pool):
            return make_exact()
        if place.pool.role == "prefill":
            room = CountedRoom(memory) if place.owns_memory else NamedRoom(worker, listener)
            return FastPrefill(worker, place.pool, room, self.timeline, listener)
        pages = FastPages(memory, worker.index, owns_memory=place.owns_memory)
        fast = FastEngine(place.pool, pages, self.timeline, listener)
        return SwitchingEngine(fast, pages, make_exact, may_look_ahead=self.looks_ahead)

    def _num_stock_pages(self, place: Place) -> int:
        """More than a real batcher there ever holds beyond what is in use: what sequences are about to want, which is a
        page for each that decodes, and all pages of the prompts that the next two steps get to; and its reserve."""
        pool = place.pool
        num_pages = pool.max_num_seqs + 3 * watermark_pages(place.memory.num_pages)
        if pool.role == "prefill" or pool.serves_locally:
            num_prompts = min(pool.max_num_seqs, 2 + 2 * pool.max_num_batched_tokens // pool.chunk_tokens)
            num_pages += num_prompts * num_pages_for(self.longest_prompt_tokens)
        return num_pages

    def _may_be_fast(self, pool: PoolSpec) -> bool:
        """As far as it depends on the pool, and there is no more than one lane."""
        if pool.target_step_ms > 0:
            return False
        if pool.role == "prefill":
            return True
        policy = self.policy.make()
        is_plain = policy.gate is None and policy.step_budget is None and not policy.is_preemptive
        is_continuous = self.spec.join.batching is Batching.CONTINUOUS
        # Prompts that join in one step may lack a page there that the pool gets for them before the next one.
        is_alone = pool.role == "local" or not pool.serves_locally
        return is_plain and is_continuous and is_alone

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
        if place.owns_memory:
            page_pool = PagePool(reserve_pages=memory.num_pages, reserve_slots=len(memory.records))
        else:
            page_pool = PagePool(reserve_pages=watermark_pages(memory.num_pages), reserve_slots=0)
        open_log = memory.records.__getitem__
        if pool.role == "prefill":
            return PrefillBatcher(limits, page_pool, open_log)
        settings = RunningSettings(self.spec.join, self.spec.preemption, num_arena_pages=memory.num_pages)
        if pool.role == "local" or pool.serves_locally:
            return LocalBatcher(limits, page_pool, open_log, settings)
        return DecodeBatcher(limits, page_pool, settings)

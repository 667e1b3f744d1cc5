"""Makes the engines of simulated workers: the real batchers, and the fast ones where they are their equal."""

import math
from dataclasses import dataclass

from weir.engine.batching.batcher import Batcher, BatchLimits
from weir.engine.batching.own_rules import Batching
from weir.engine.batching.prefill import PrefillBatcher
from weir.engine.batching.running import RunningBatcher, RunningSettings
from weir.engine.memory.pages import PagePool
from weir.engine.messages import Arrival, SetBounds
from weir.kv.geometry import num_pages_for, watermark_pages
from weir.policy.registry import PolicySpec
from weir.sim.engines.exact import ExactEngine
from weir.sim.engines.fast import FastEngine
from weir.sim.engines.fast_batch import FastRow
from weir.sim.engines.fast_prefill import FastPrefill
from weir.sim.memory import Location, PlainMemory
from weir.sim.request_state import TOKEN, VOCAB_SIZE, RequestStates
from weir.sim.spec import PoolSpec, SystemSpec
from weir.sim.timeline import Timeline
from weir.sim.worker import Engine, SimWorker, WorkerListener

_NEVER_STALLED_S = 1e9
"""A simulated sequence that waits for pages waits on; what that costs is to be seen in its latency."""


@dataclass(frozen=True, slots=True)
class EngineMaker:
    """`fast_forward`: fast engines where they are equal to the real batchers. `is_roomy`: also in prefill workers, and
    in decode workers, into whose memory hand-offs come; those raise MemoryIsTight when they may be equal no more.
    `step_shares`: of lanes, as in `SetBounds`."""

    spec: SystemSpec
    policy: PolicySpec
    timeline: Timeline
    fast_forward: bool
    is_roomy: bool
    step_shares: tuple[float, ...] = ()

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
        go_exact = None
        if pool.role == "local":

            def go_exact(fast: FastEngine) -> Engine:
                takes_pages_whole = self.spec.preemption.max_preemptions == 0
                moved = _taken_from(fast, worker, memory, takes_pages_whole)
                exact = make_exact()
                for arrival, num_passed_over in moved:
                    exact.go_on(arrival, num_passed_over)
                worker.drive(exact)
                return exact

        else:
            # More than a real batcher ever holds beyond what is in use: a page for each that decodes, its watermark.
            memory.keep_spare(pool.max_num_seqs + 3 * watermark_pages(memory.num_pages))
        return FastEngine(pool, memory, worker.index, self.timeline, listener, go_exact)

    def _may_be_fast(self, pool: PoolSpec) -> bool:
        """As far as it depends on the pool, and there is no more than one lane."""
        if not self.fast_forward or pool.target_step_ms > 0:
            return False
        if pool.role != "local" and (self.spec.link is None or self.spec.shares_cores):
            return False
        if pool.role == "prefill":
            return self.is_roomy
        policy = self.policy.make()
        is_plain = policy.gate is None and policy.step_budget is None and not policy.is_preemptive
        is_continuous = self.spec.join.batching is Batching.CONTINUOUS
        # Prompts that join in one step may lack a page there that the pool gets for them before the next one.
        is_alone = pool.role == "local" or (self.is_roomy and not pool.serves_locally)
        return is_plain and is_continuous and is_alone

    def _batcher(self, location: Location) -> Batcher:
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
            page_pool = PagePool(watermark_pages=memory.num_pages, watermark_slots=len(memory.records))
        else:
            page_pool = PagePool(watermark_pages=watermark_pages(memory.num_pages), watermark_slots=0)
        open_log = memory.records.__getitem__
        batcher: Batcher
        if pool.role == "prefill":
            batcher = PrefillBatcher(limits, page_pool, open_log)
        else:
            settings = RunningSettings(self.spec.join, self.spec.preemption, num_arena_pages=memory.num_pages)
            batcher = RunningBatcher(limits, page_pool, open_log, settings)
        batcher.set_policy(self.policy.make())
        if self.step_shares:
            batcher.set_bounds(SetBounds(pool.max_num_seqs, pool.max_num_batched_tokens, self.step_shares))
        return batcher


def _taken_from(
    fast: FastEngine, worker: SimWorker, memory: PlainMemory, takes_pages_whole: bool
) -> list[tuple[Arrival, int]]:
    """Its sequences as a batcher takes them, in the order in which they came, with the steps that passed each over.
    `takes_pages_whole`: of a prompt, as soon as it joins.

    Their pages have ids from here on. It may be asked for nothing more than its counters.
    """
    fast.settle_all()
    fast.die()
    memory.release_all(worker.index)
    moved = []
    for row in fast.rows.values():
        num_least_pages = row.num_prompt_pages if takes_pages_whole else 0
        moved.append((_half_done(row, fast, worker, memory, num_least_pages), row.num_passed_over))
    return moved


def _half_done(row: FastRow, fast: FastEngine, worker: SimWorker, memory: PlainMemory, num_least_pages: int) -> Arrival:
    if row.is_waiting:
        return row.arrival.for_batcher(memory)
    num_prompt_tokens = row.num_prompt_tokens
    num_tokens = row.context(fast.num_done_steps + 1) if row.first_step else num_prompt_tokens
    num_computed = num_tokens - 1 if row.first_step else row.num_computed
    num_pages = max(num_least_pages, num_pages_for(num_computed))
    bundle = memory.try_acquire(worker.index, num_pages, 1)
    assert bundle is not None, "these pages are in use, and a memory has twice as many slots as sequences run"
    slot = bundle.slots[0]
    params, record = row.state.params(), memory.records[slot]
    record.begin(params)
    return Arrival(
        params,
        slot=slot,
        log=record,
        output_token_ids=(TOKEN,) * (num_tokens - num_prompt_tokens),
        block_table=bundle.page_ids,
        num_computed_tokens=num_computed,
    )

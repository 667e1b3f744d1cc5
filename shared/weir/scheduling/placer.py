"""Where a request runs: where its first token is estimated to come soonest, and a decode worker that keeps its pace.

    cost = time until the worker has prefilled what it was given before + time to prefill what is not cached there
         + hand-off + itl_weight * time between two tokens on the decode worker

Least cost, not longest prefix: when all prompts begin alike, the longest prefix sends all of them to one worker. The
rule is that of Mooncake's Conductor (Qin et al., FAST 2025, arXiv 2407.00079). In large pools two workers are sampled
and compared (Mitzenmacher, "The Power of Two Choices"), beside two of those that have the longest prefix. Three other
rules are there to measure it against.
"""

import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from operator import itemgetter
from typing import NamedTuple

from weir.bus.messages import Placement, Submit
from weir.kv.geometry import num_pages_for
from weir.scheduling.limits import CoreLimits, PlacingLimits
from weir.scheduling.memory_fit import LaneShares, make_memory_fit
from weir.scheduling.pools import ArenaLoad, OpenSlots, Pool, PrefillCandidate, WorkerPools, WorkerState
from weir.scheduling.prefix_view import Hashes, PrefixView, hashes_from
from weir.scheduling.request import PlacementPlan, ScheduledRequest
from weir.scheduling.reservations import PrefillLoad, Reservations
from weir.scheduling.workers import Workers

_NUM_SAMPLED = 2
_MAX_HOLDERS = 2
_SITUATION_S = 0.25
_FIRST = itemgetter(0)
LEAST_FETCHED_TOKENS = 256
"""Fewer are computed again sooner than they are asked for."""


class Option(NamedTuple):
    """One candidate for one request, with what is expected there; the least `cost_ms` is the best."""

    cost_ms: float
    candidate: PrefillCandidate
    decode_workers: Sequence[WorkerState]
    """Those that have a slot for it, the best first; never none."""
    num_cached_tokens: int
    is_full: bool
    """It has as many prompts as it may have, and is an option only for what it has cached."""
    queue_ms: float
    prefill_ms: float
    hand_off_ms: float

    @property
    def ttft_ms(self) -> float:
        return self.queue_ms + self.prefill_ms + self.hand_off_ms

    def kind(self, split: "Option | None") -> str:
        """Why it was chosen, as the metric's label. `split`: the best one on a prefill worker."""
        if not self.candidate.is_local:
            return "split_cached" if self.num_cached_tokens else "split"
        if split is None:
            return "local"
        if split.queue_ms > self.ttft_ms:
            return "local_queue"
        return "local_hand_off" if split.hand_off_ms > split.prefill_ms else "local_short"


class Router:
    """What it costs to place a request on a worker, by the rule that the limits name."""

    def __init__(self, limits: PlacingLimits) -> None:
        self._limits = limits
        self._random = random.Random(limits.seed)
        self._is_estimating = limits.router == "estimated-ttft"

    def option(
        self,
        candidate: PrefillCandidate,
        decode_workers: Sequence[WorkerState],
        submit: Submit,
        num_cached_tokens: int,
        *,
        is_full: bool,
        has_both_kinds: bool,
        now_s: float,
    ) -> Option:
        """`has_both_kinds`: prefill workers and decode workers could prefill it."""
        worker, limits = candidate.worker, self._limits
        num_uncached = submit.num_prompt_tokens - num_cached_tokens
        queue_ms = worker.prefill.queue_ms(now_s) if worker.prefill.prompts else 0.0
        if candidate.is_local:
            prefill_ms, hand_off_ms = worker.prefill_beside_ms(num_uncached, num_cached_tokens), 0.0
            ttft_ms = queue_ms + (prefill_ms + limits.local_harm * prefill_ms * len(worker.decode.priorities))
            if has_both_kinds:
                ttft_ms /= 1 - limits.local_gain
        else:
            prefill_ms = worker.prefill_ms(num_uncached, num_cached_tokens)
            hand_off_ms = limits.hand_off_time_ms(submit.num_prompt_tokens)
            ttft_ms = queue_ms + (prefill_ms + hand_off_ms)
        itl_cost_ms = limits.itl_weight * decode_workers[0].itl_ms(submit.num_prompt_tokens)
        if self._is_estimating:
            cost_ms = ttft_ms + limits.prefill_weight * prefill_ms + itl_cost_ms
        else:
            cost_ms = self._baseline_cost(num_cached_tokens, queue_ms, itl_cost_ms)
        return Option(cost_ms, candidate, decode_workers, num_cached_tokens, is_full, queue_ms, prefill_ms, hand_off_ms)

    def _baseline_cost(self, num_cached_tokens: int, queue_ms: float, itl_cost_ms: float) -> float:
        match self._limits.router:
            case "longest-prefix":
                return -num_cached_tokens
            case "random":
                return self._random.random()
            case _:
                return queue_ms + itl_cost_ms


class Placer:
    """Plans placements, and reserves nothing itself."""

    def __init__(
        self,
        limits: CoreLimits,
        workers: Workers,
        reservations: Reservations,
        wanting: Callable[[str], Collection[str]] = lambda model: (),
    ) -> None:
        """`wanting`: the lanes with a guaranteed share that have requests of the model waiting."""
        self._wanting = wanting
        self.prefixes = PrefixView()
        self._workers = workers
        self._reservations = reservations
        self._counts: Counter[str] = Counter()
        self._limits = limits
        self._start_over()
        self.set_limits(limits)

    def set_limits(self, limits: CoreLimits) -> None:
        """Another memory fit or router begins without what the one before has learned."""
        is_new = (limits.placing, limits.page_overcommit) != (self._limits.placing, self._limits.page_overcommit)
        self._limits = limits
        self._shares = LaneShares(limits)
        self._is_shared_out = any(lane.guaranteed_share for lane in limits.lanes)
        self._is_timeless = limits.placing.memory_fit == "conservative"
        self._groups = {lane.name: lane.worker_group for lane in limits.lanes}
        self.pools = WorkerPools(self._workers, self._reservations, limits.slot_overcommit)
        if is_new:
            self._start_over()

    def slot_situation(self) -> tuple[int, int]:
        """As long as it stays the same, what found no slot finds none."""
        return self._reservations.num_ends, self._workers.num_changes

    def situation(self, now_s: float) -> tuple[int, ...]:
        """As long as it stays the same, what did not fit does not fit."""
        return (
            self._reservations.num_frees,
            self._workers.num_changes,
            0 if self._is_timeless else int(now_s / _SITUATION_S),
        )

    def finished(self, request: ScheduledRequest, num_output_tokens: int) -> None:
        """It came to its own end after so many tokens."""
        self._memory_fit.finished(request.submit.model, num_output_tokens)

    def charged_pages(self, request: ScheduledRequest) -> int:
        """What it would count against its lane's share, granted now."""
        return self._memory_fit.charged_pages(request.submit)

    def num_uncached_tokens(self, submit: Submit) -> int:
        """Of its prompt, where most of it is cached; at least 1."""
        hashes = hashes_from(submit.page_hashes)
        holders = self.prefixes.deepest(self.pools.pool(submit.model, "").arena_ids, hashes) if hashes else ()
        num_cached = self.prefixes.num_cached_tokens(holders[0], hashes) if holders else 0
        return max(submit.num_prompt_tokens - num_cached, 1)

    def is_kept_out(self, request: ScheduledRequest, page_counts: Collection[int], now_s: float) -> bool:
        """Whether what is never lent of others' guarantees is too much for it in each arena of so many pages, even if
        nothing runs there. A test that learns lengths may come to think better of its output, not of its prompt."""
        if not self._is_shared_out or self._limits.lent_share == 1:
            return False
        opened = {self._shares.open_to(request.lane, {}, num_pages) for num_pages in page_counts}
        if not self._is_timeless:
            return num_pages_for(request.submit.num_prompt_tokens + 1) > max(opened, default=0)
        empty = ArenaLoad("", 0, ())
        return not any(self._memory_fit.fits(empty, num_pages, request.submit, now_s) for num_pages in opened)

    def has_slot(self, request: ScheduledRequest) -> bool:
        """The quickest of all questions, and when workers are busy the answer is mostly no."""
        pool = self.pools.pool(request.submit.model, self._groups.get(request.lane, ""))
        return request.priority < pool.slots.bound

    def try_place(self, request: ScheduledRequest, now_s: float) -> PlacementPlan | None:
        """None: nothing that the request needs is free now."""
        pool = self.pools.pool(request.submit.model, self._groups.get(request.lane, ""))
        if request.priority >= pool.slots.bound:
            return None
        hashes = hashes_from(request.submit.page_hashes)
        plan = None
        if pool.num_choices > self._limits.placing.small_pool:
            sample = self._sample(pool, hashes)
            plan = self._try_plan(request, sample, pool, hashes, now_s, is_sample=True)
        return plan or self._try_plan(request, pool.candidates, pool, hashes, now_s, is_sample=False)

    def metrics(self) -> dict[str, float]:
        """Counters (`_total`) and gauges."""
        counts = {f"placed_{kind}_total": float(count) for kind, count in self._counts.items()}
        return counts | self.prefixes.metrics()

    def _start_over(self) -> None:
        placing = self._limits.placing
        self._memory_fit = make_memory_fit(placing, self._limits.page_overcommit)
        self._random = random.Random(placing.seed)
        self._router = Router(placing)

    def _sample(self, pool: Pool, hashes: Hashes) -> Sequence[PrefillCandidate]:
        """A few candidates, and some of those that have the longest prefix, in the order of the pool."""
        candidates = pool.candidates
        sampled = {self._random.randrange(len(candidates)) for _ in range(_NUM_SAMPLED)}
        holders = self.prefixes.deepest(pool.arena_ids, hashes)
        if holders:
            at_holders = [index for index, one in enumerate(candidates) if one.worker.arena.arena_id in holders]
            sampled |= {at_holders[self._random.randrange(len(at_holders))] for _ in range(_MAX_HOLDERS)}
        return [candidates[index] for index in sorted(sampled)]

    def _try_plan(
        self,
        request: ScheduledRequest,
        candidates: Sequence[PrefillCandidate],
        pool: Pool,
        hashes: Hashes,
        now_s: float,
        *,
        is_sample: bool,
    ) -> PlacementPlan | None:
        options = self._options(request, candidates, pool.slots, hashes, now_s, is_sample=is_sample)
        if all(option.is_full for option in options):
            return None
        options.sort(key=_FIRST)
        choice = self._try_choose(request, options, now_s)
        if choice is None:
            return None
        option, decode_worker = choice
        arena_id = option.candidate.worker.arena.arena_id
        prefix_source = self._prefix_source(pool, arena_id, hashes)
        self.prefixes.place(arena_id, hashes, now_s)
        split = next((one for one in options if not one.candidate.is_local), None)
        kind = option.kind(split)
        self._counts[kind] += 1
        return self._plan(request, option, decode_worker, kind, prefix_source)

    def _prefix_source(self, pool: Pool, arena_id: str, hashes: Hashes) -> str:
        """Where the prefix of a prompt that is placed in this arena comes from, if another one has enough more of it.
        Load comes first: what is placed elsewhere takes its prefix along, also while it is being computed there. What
        is only about to be computed in this one does not count: of several prompts that begin alike whichever comes
        first is to bring it."""
        addresses = pool.pages_addresses
        if len(addresses) < 2 or arena_id not in addresses or not hashes:
            return ""
        holders = self.prefixes.deepest([other for other in addresses if other != arena_id], hashes)
        num_there = self.prefixes.num_cached_tokens(holders[0], hashes) if holders else 0
        num_here = self.prefixes.num_reported_tokens(arena_id, hashes)
        return addresses[holders[0]] if num_there - num_here >= LEAST_FETCHED_TOKENS else ""

    def _options(
        self,
        request: ScheduledRequest,
        candidates: Sequence[PrefillCandidate],
        slots: OpenSlots,
        hashes: Hashes,
        now_s: float,
        *,
        is_sample: bool,
    ) -> list[Option]:
        """Each candidate that may prefill the request, with the workers that would decode it.

        One that has as many prompts as it may have is among them only for what it has cached: a request that waits
        for it there waits less than a prefill elsewhere takes.
        """
        submit, max_prefills, max_tokens = request.submit, self._limits.max_prefills, self._limits.max_prefill_tokens
        num_prompt_tokens, num_context_tokens = submit.num_prompt_tokens, request.num_tokens
        open_ids = None if is_sample else slots.open_to(request.priority)
        has_both_kinds = bool(candidates) and candidates[0].is_local != candidates[-1].is_local
        cached_by_arena: dict[str, int] = {}
        decode_by_host: dict[tuple[WorkerState, ...], Sequence[WorkerState]] = {}
        options: list[Option] = []
        for candidate in candidates:
            worker = candidate.worker
            if num_context_tokens > worker.max_context_tokens:
                continue
            if open_ids is not None and candidate.decode_ids.isdisjoint(open_ids):
                continue
            num_cached, load = 0, worker.prefill
            if hashes:
                arena_id = worker.arena.arena_id
                if arena_id not in cached_by_arena:
                    cached_by_arena[arena_id] = self.prefixes.num_cached_tokens(arena_id, hashes)
                num_cached = min(cached_by_arena[arena_id], num_prompt_tokens - 1)  # the last one is computed
            num_prompts, num_tokens = len(load.prompts), load.num_tokens
            if num_prompts >= max_prefills or num_tokens + num_prompt_tokens > max_tokens:
                num_prompts, num_tokens = load.ahead_of(request.scheduling.lane_priority)
            num_tokens += num_prompt_tokens - num_cached
            is_full = num_prompts > 0 and (num_prompts >= max_prefills or num_tokens > max_tokens)
            if is_full and self._has_share_left(request, load):
                num_prompts, is_full = 0, False
            if is_full and (not num_cached or num_prompts >= max_prefills):
                continue
            decode = decode_by_host.get(candidate.decode_workers)
            if decode is None:
                decode = self._open_decode_workers(request, candidate.decode_workers, slots, is_sample=is_sample)
                decode_by_host[candidate.decode_workers] = decode
            if decode:
                option = self._router.option(
                    candidate, decode, submit, num_cached, is_full=is_full, has_both_kinds=has_both_kinds, now_s=now_s
                )
                options.append(option)
        return options

    def _has_share_left(self, request: ScheduledRequest, load: PrefillLoad) -> bool:
        """Whether the worker may have a prompt more of the lane, for the steps of which a part is the lane's own."""
        share = self._limits.lanes_by_name[request.lane].guaranteed_step_share
        if not share:
            return False
        num_prompts, num_tokens = load.of_lane(request.scheduling.lane_priority)
        if not num_prompts:
            return True
        num_tokens += request.submit.num_prompt_tokens
        return num_prompts < share * self._limits.max_prefills and num_tokens <= share * self._limits.max_prefill_tokens

    def _open_decode_workers(
        self, request: ScheduledRequest, workers: Sequence[WorkerState], slots: OpenSlots, *, is_sample: bool
    ) -> Sequence[WorkerState]:
        """Those with a slot for it, the quickest first if it keeps the target, else the one with the most room."""
        if len(workers) == 1:
            has_room = request.num_tokens <= workers[0].max_context_tokens
            return workers if has_room and slots.is_open(workers[0].worker_id, request.priority) else ()
        if is_sample and len(workers) > self._limits.placing.small_pool:
            workers = self._random.sample(workers, _NUM_SAMPLED)
        num_tokens, is_open, priority = request.num_tokens, slots.is_open, request.priority
        free = [
            worker
            for worker in workers
            if num_tokens <= worker.max_context_tokens and is_open(worker.worker_id, priority)
        ]
        if len(free) < 2:
            return free
        num_prompt_tokens, target_ms = request.submit.num_prompt_tokens, request.scheduling.itl_target_ms
        by_itl = sorted(((worker.itl_ms(num_prompt_tokens), worker) for worker in free), key=_FIRST)
        if target_ms and by_itl[0][0] > target_ms:
            return sorted(free, key=lambda worker: worker.arena.num_reserved_pages - worker.arena.num_pages)
        return [worker for _, worker in by_itl]

    def _try_choose(
        self, request: ScheduledRequest, options: Sequence[Option], now_s: float
    ) -> tuple[Option, WorkerState] | None:
        """The first option, and of it the first decode worker, whose arena has room."""
        refused: set[str] = set()
        for option in options:
            for worker in option.decode_workers:
                arena_id = worker.arena.arena_id
                if arena_id not in refused and self._has_memory(request, worker.arena, now_s):
                    return option, worker
                refused.add(arena_id)
        return None

    def _has_memory(self, request: ScheduledRequest, arena: ArenaLoad, now_s: float) -> bool:
        submit, num_pages = request.submit, arena.num_pages
        if self._is_shared_out:
            charged, wanting = arena.pages_by_lane(), self._wanting(submit.model)
            if self._shares.can_take_back(request.lane, self._memory_fit.charged_pages(submit), charged, num_pages):
                return True
            num_open = self._shares.open_to(request.lane, charged, num_pages, wanting)
            num_pages = num_open + sum(charged.values())
        return self._memory_fit.fits(arena, num_pages, submit, now_s)

    def _plan(
        self, request: ScheduledRequest, option: Option, decode_worker: WorkerState, kind: str, prefix_source: str
    ) -> PlacementPlan:
        submit, prefill, decode = request.submit, option.candidate.worker.record, decode_worker.record
        placement = Placement(
            dispatch=submit.dispatch,
            prefill_worker_id=prefill.worker_id,
            prefill_address=prefill.address,
            decode_worker_id=decode.worker_id,
            decode_address=decode.address,
            num_reserved_pages=request.num_pages,
            scheduling=request.scheduling,
            reason=f"{kind}: first token in about {option.ttft_ms:.0f} ms, {option.num_cached_tokens} of "
            f"{submit.num_prompt_tokens} tokens cached{', more from ' if prefix_source else ''}{prefix_source}",
            prefix_source=prefix_source,
        )
        return PlacementPlan(
            placement,
            num_charged_pages=self._memory_fit.charged_pages(submit),
            num_cached_tokens=option.num_cached_tokens,
            prefill_ms=option.prefill_ms,
            itl_ms=decode_worker.itl_ms(submit.num_prompt_tokens),
        )

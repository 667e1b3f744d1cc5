"""Where a request runs: where its first token is estimated to come soonest, and a decode worker that keeps its pace.

    cost = time until the worker has read what it was given before + time to read what is not cached there
         + hand-off + itl_weight * time between two tokens on the decode worker

Least cost, not longest prefix: when all prompts begin alike, the longest prefix sends all of them to one worker. The
rule is that of Mooncake's Conductor (Qin et al., FAST 2025, arXiv 2407.00079). In large pools two workers are drawn
and compared (Mitzenmacher, "The Power of Two Choices"), beside two of those that have the longest prefix.
"""

import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from operator import itemgetter

from weir.bus.messages import Placement, Submit
from weir.kv.geometry import num_pages_for
from weir.scheduling.accounting.reservations import Reservations
from weir.scheduling.accounting.shares import can_take_back, pages_open_to
from weir.scheduling.limits.core_limits import CoreLimits
from weir.scheduling.placement.deadlines import DeadlineEstimator
from weir.scheduling.placement.memory_fit import MemoryUse, make_memory_fit
from weir.scheduling.placement.routing import Option, Router, kind_of
from weir.scheduling.placement_plan import PlacementPlan
from weir.scheduling.request import ScheduledRequest
from weir.scheduling.workers.pools import ArenaLoad, DecodeCandidate, Pool, WorkerPools
from weir.scheduling.workers.prefix_view import Hashes, PrefixView, hashes_from
from weir.scheduling.workers.slots import OpenSlots, Vacancies
from weir.scheduling.workers.workers import Workers

_NUM_DRAWN = 2
_MAX_HOLDERS = 2
_SITUATION_S = 0.25
_BY_COST = itemgetter(0, 1)


class Placer:
    """Asks the book what is booked, and books nothing itself."""

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
        self._pools = WorkerPools(workers, reservations)
        self._counts: Counter[str] = Counter()
        self._limits = limits
        self._start_over()
        self.set_limits(limits)

    def set_limits(self, limits: CoreLimits) -> None:
        """Another memory test or router begins without what the one before has learned."""
        is_new = (limits.placing, limits.page_overcommit) != (self._limits.placing, self._limits.page_overcommit)
        self._limits = limits
        self._is_shared_out = any(lane.guaranteed_share for lane in limits.lanes)
        self._is_timeless = limits.placing.memory_fit == "conservative"
        self._groups = {lane.name: lane.worker_group for lane in limits.lanes}
        self._vacancies = Vacancies(self._pools, self._workers, self._reservations, limits.slot_overcommit)
        if is_new:
            self._start_over()

    def slot_situation(self) -> tuple[int, int]:
        """As long as it stays the same, what found no slot finds none."""
        return self._reservations.num_ends, self._workers.num_changes

    def deadline_estimator(self) -> DeadlineEstimator:
        """By the limits of now."""
        return DeadlineEstimator(self._limits, self._pools, self.prefixes)

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
        holders = self.prefixes.deepest(self._pools.arena_ids(submit.model, ""), hashes) if hashes else ()
        num_cached = self.prefixes.num_cached_tokens(holders[0], hashes) if holders else 0
        return max(submit.num_prompt_tokens - num_cached, 1)

    def is_kept_out(self, request: ScheduledRequest, page_counts: Collection[int], now_s: float) -> bool:
        """Whether what is never lent of others' guarantees is too much for it in each memory of so many pages, even if
        nothing runs there. A test that learns lengths may come to think better of its answer, not of its prompt."""
        if not self._is_shared_out or self._limits.lent_share == 1:
            return False
        opened = {pages_open_to(request.lane, {}, num_pages, self._limits) for num_pages in page_counts}
        if not self._is_timeless:
            return num_pages_for(request.submit.num_prompt_tokens + 1) > max(opened, default=0)
        uses = (MemoryUse("", num_pages, 0, ()) for num_pages in opened)
        return not any(self._memory_fit.fits(use, request.submit, now_s) for use in uses)

    def has_slot(self, request: ScheduledRequest) -> bool:
        """The quickest of all questions, and when workers are busy the answer is mostly no."""
        return request.priority < self._vacancies.of(request.submit.model, self._groups.get(request.lane, "")).bound

    def try_place(self, request: ScheduledRequest, now_s: float) -> Placement | None:
        """None: nothing that the request needs is free now. Otherwise `request.plan` says what is expected."""
        submit, small = request.submit, self._limits.placing.small_pool
        group = self._groups.get(request.lane, "")
        slots = self._vacancies.of(submit.model, group)
        if request.priority >= slots.bound:
            return None
        pool = self._pools.pool(submit.model, group)
        hashes = hashes_from(submit.page_hashes)
        if pool and (len(pool) > small or len(pool[0].decode) > small):
            drawn = self._draw(pool, hashes)
            placement = self._try_seats(request, drawn, hashes, slots, now_s, is_drawn=True)
            if placement is not None:
                return placement
        return self._try_seats(request, pool, hashes, slots, now_s, is_drawn=False)

    def metrics(self) -> dict[str, float]:
        """Counters (`_total`) and gauges."""
        counts = {f"placed_{kind}_total": float(count) for kind, count in self._counts.items()}
        return counts | self.prefixes.metrics()

    def _start_over(self) -> None:
        placing = self._limits.placing
        self._memory_fit = make_memory_fit(placing, self._limits.page_overcommit)
        self._random = random.Random(placing.seed)
        self._router = Router(placing)

    def _draw(self, pool: Pool, hashes: Hashes) -> Pool:
        drawn = {self._random.randrange(len(pool)) for _ in range(_NUM_DRAWN)}
        holders = self.prefixes.deepest(tuple({candidate.worker.arena_id: None for candidate in pool}), hashes)
        if holders:
            at_holders = [index for index, candidate in enumerate(pool) if candidate.worker.arena_id in holders]
            drawn |= {at_holders[self._random.randrange(len(at_holders))] for _ in range(_MAX_HOLDERS)}
        return tuple(pool[index] for index in sorted(drawn))

    def _try_seats(
        self,
        request: ScheduledRequest,
        pool: Pool,
        hashes: Hashes,
        slots: OpenSlots,
        now_s: float,
        *,
        is_drawn: bool,
    ) -> Placement | None:
        options = self._options(request, pool, hashes, slots, now_s, is_drawn=is_drawn)
        if all(option.is_full for option in options):
            return None
        options.sort(key=_BY_COST)
        refused: set[str] = set()
        for option in options:
            for decode in option.decodes:
                arena_id = decode.memory.arena_id
                if arena_id not in refused and self._has_memory(request, decode.memory, now_s):
                    self.prefixes.place(option.candidate.worker.arena_id, hashes, now_s)
                    return self._place(request, option, decode, options, now_s)
                refused.add(arena_id)
        return None

    def _options(
        self, request: ScheduledRequest, pool: Pool, hashes: Hashes, slots: OpenSlots, now_s: float, *, is_drawn: bool
    ) -> list[Option]:
        """Each worker that may read the prompt, with those that would go on.

        One that has been given enough already is among them only for what it has cached: who waits for it there waits
        less than others would read.
        """
        submit, num_request_tokens = request.submit, request.num_tokens
        max_prefills, max_prefill_tokens = self._limits.max_prefills, self._limits.max_prefill_tokens
        open_ids = None if is_drawn else slots.open_to(request.priority)
        is_choice = bool(pool) and pool[0].is_local != pool[-1].is_local
        router = self._router
        cached_by_memory: dict[str, int] = {}
        decodes_by_host: dict[tuple[DecodeCandidate, ...], Sequence[DecodeCandidate]] = {}
        options: list[Option] = []
        for place, candidate in enumerate(pool):
            if open_ids is not None and candidate.decode_workers.isdisjoint(open_ids):
                continue
            worker, load = candidate.worker, candidate.worker.prefill
            if num_request_tokens > worker.max_context_tokens:
                continue
            num_cached = 0
            if hashes:
                arena_id = worker.arena_id
                if arena_id not in cached_by_memory:
                    cached_by_memory[arena_id] = self._num_cached_tokens(submit, arena_id, hashes)
                num_cached = cached_by_memory[arena_id]
            num_prompts, num_tokens = len(load.prompts), load.num_tokens
            if num_prompts >= max_prefills or num_tokens + submit.num_prompt_tokens > max_prefill_tokens:
                num_prompts, num_tokens = load.ahead_of(request.scheduling.lane_priority)
            num_tokens += submit.num_prompt_tokens - num_cached
            is_full = num_prompts > 0 and (num_prompts >= max_prefills or num_tokens > max_prefill_tokens)
            if is_full and (not num_cached or num_prompts >= max_prefills):
                continue
            decodes = decodes_by_host.get(candidate.decode)
            if decodes is None:
                decodes = decodes_by_host[candidate.decode] = self._decodes(
                    request, slots, candidate.decode, is_drawn=is_drawn
                )
            if decodes:
                cost_ms = router.cost_ms(candidate, decodes[0], submit, num_cached, now_s, is_choice)
                options.append(Option(cost_ms, place, candidate, decodes, num_cached, is_full))
        return options

    def _num_cached_tokens(self, submit: Submit, arena_id: str, hashes: Hashes) -> int:
        """Of its prompt; the last token is always computed."""
        return min(self.prefixes.num_cached_tokens(arena_id, hashes), submit.num_prompt_tokens - 1)

    def _decodes(
        self, request: ScheduledRequest, slots: OpenSlots, candidates: Sequence[DecodeCandidate], *, is_drawn: bool
    ) -> Sequence[DecodeCandidate]:
        """Those with a slot for it, the quickest first if it keeps the target, else the one with the most room."""
        if is_drawn and len(candidates) > self._limits.placing.small_pool:
            candidates = self._random.sample(candidates, _NUM_DRAWN)
        own = request.priority
        free = [
            candidate
            for candidate in candidates
            if request.num_tokens <= candidate.worker.max_context_tokens
            and slots.is_open(candidate.worker.worker_id, own)
        ]
        if len(free) < 2:
            return free
        num_prompt_tokens, target_ms = request.submit.num_prompt_tokens, request.scheduling.itl_target_ms
        itls_ms = [
            (candidate.worker.itl_ms(num_prompt_tokens), index, candidate) for index, candidate in enumerate(free)
        ]
        if target_ms and min(itls_ms)[0] > target_ms:
            return sorted(free, key=lambda candidate: candidate.memory.num_reserved_pages - candidate.memory.num_pages)
        return [candidate for _, _, candidate in sorted(itls_ms, key=itemgetter(0, 1))]

    def _has_memory(self, request: ScheduledRequest, memory: ArenaLoad, now_s: float) -> bool:
        submit, num_pages = request.submit, memory.num_pages
        if self._is_shared_out:
            charged, wanting = memory.pages_by_lane(), self._wanting(submit.model)
            if can_take_back(request.lane, self._memory_fit.charged_pages(submit), charged, num_pages, self._limits):
                return True
            num_open = pages_open_to(request.lane, charged, num_pages, self._limits, wanting)
            num_pages = num_open + sum(charged.values())
        use = MemoryUse(memory.arena_id, num_pages, memory.num_reserved_pages, [load.lengths for load in memory.loads])
        return self._memory_fit.fits(use, submit, now_s)

    def _place(
        self,
        request: ScheduledRequest,
        option: Option,
        decode: DecodeCandidate,
        options: Sequence[Option],
        now_s: float,
    ) -> Placement:
        submit, reader, writer = request.submit, option.candidate.worker.record, decode.worker.record
        expected = self._router.expect(option, decode, submit, now_s)
        split = (
            next((one for one in options if not one.candidate.is_local), None) if option.candidate.is_local else None
        )
        beside = self._router.expect(split, split.decodes[0], submit, now_s) if split else None
        kind = kind_of(option, expected, beside)
        self._counts[kind] += 1
        request.plan = PlacementPlan(
            num_cached_tokens=option.num_cached_tokens,
            prefill_ms=expected.prefill_ms,
            itl_ms=expected.itl_ms,
            num_charged_pages=self._memory_fit.charged_pages(submit),
        )
        reason = (
            f"{kind}: first token in about {expected.ttft_ms:.0f} ms, {option.num_cached_tokens} of "
            f"{submit.num_prompt_tokens} tokens cached"
        )
        return Placement(
            dispatch=submit.dispatch,
            prefill_worker_id=reader.worker_id,
            prefill_address=reader.address,
            decode_worker_id=writer.worker_id,
            decode_address=writer.address,
            num_reserved_pages=request.num_pages,
            scheduling=request.scheduling,
            reason=reason,
        )

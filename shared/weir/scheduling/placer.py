"""Where a request runs: where its first token is estimated to come soonest, and a decode worker that keeps its pace.

Least cost (`weir.scheduling.routing`), not longest prefix: when all prompts begin alike, the longest prefix sends all
of them to one worker. The rule is that of Mooncake's Conductor (Qin et al., FAST 2025, arXiv 2407.00079). Where
many workers have a slot two are sampled and compared (Mitzenmacher, "The Power of Two Choices"), beside two of those
that have the longest prefix. Three other rules are there to measure it against.
"""

import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from operator import itemgetter
from typing import NamedTuple

from weir.bus.messages import Placement, Submit
from weir.bus.prefix_news import MAX_FETCHED, PrefixChanged
from weir.kv.geometry import PAGE_TOKENS, num_pages_for
from weir.scheduling.limits import CoreLimits
from weir.scheduling.memory_fit import LaneShares, make_memory_fit
from weir.scheduling.pools import ArenaLoad, OpenSlots, Pool, PrefillCandidate, WorkerPools, WorkerState
from weir.scheduling.prefix_view import Hashes, PrefixDepths, PrefixView, hashes_from
from weir.scheduling.request import PlacementPlan, ScheduledRequest
from weir.scheduling.reservations import PrefillLoad, Reservations
from weir.scheduling.routing.crossing import CrossingPrompt, CrossingRouter, has_room
from weir.scheduling.routing.links import LinkCost, LinkRates
from weir.scheduling.routing.router import Option, Router
from weir.scheduling.routing.sources import LEAST_FETCHED_TOKENS, PromptSources
from weir.scheduling.workers import Workers

_NUM_SAMPLED = 2
_MAX_HOLDERS = 2
_MAX_SENDERS = 4
_SITUATION_S = 0.25
_FIRST = itemgetter(0)


class _Asked(NamedTuple):
    """Of one request that wants a place, for one decision."""

    request: ScheduledRequest
    pool: Pool
    now_s: float
    hashes: Hashes
    depths: PrefixDepths
    sources: PromptSources | None
    """None: nothing of it can come from another host."""


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
        self.memory_fit.finished(request.submit.model, num_output_tokens)

    def charged_pages(self, request: ScheduledRequest) -> int:
        """What it would count against its lane's share, granted now."""
        return self.memory_fit.charged_pages(request.submit)

    def num_uncached_tokens(self, submit: Submit) -> int:
        """Of its prompt, where most of it is cached; at least 1."""
        depths = self.prefixes.look_up(hashes_from(submit.page_hashes))
        num_cached = depths.most_tokens(self.pools.pool(submit.model, "").arena_ids)
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
        return not any(self.memory_fit.fits(empty, num_pages, request.submit, now_s) for num_pages in opened)

    def try_place(self, request: ScheduledRequest, pool: Pool, now_s: float) -> PlacementPlan | None:
        """None: nothing that the request needs is free now in the pool, which has a slot for it."""
        asked, plan = self._look_up(request, pool, now_s), None
        places = pool.try_sampled_places(request.priority, self._limits.placing.small_pool)
        if places is not None:
            plan = self._try_plan(asked, self._sample(pool, places, asked.depths), None)
        if plan is None:
            open_ids = pool.slots.open_to(request.priority)
            plan = self._try_plan(asked, pool.open_candidates(open_ids), open_ids)
        return plan

    def has_memory(self, lane: str, submit: Submit, arena: ArenaLoad, now_s: float) -> bool:
        """Beside what runs there, and what is kept for lanes."""
        num_pages = arena.num_pages - arena.num_leaving_pages
        if self._is_shared_out:
            charged, wanting = arena.pages_by_lane(), self._wanting(submit.model)
            if self._shares.can_take_back(lane, self.memory_fit.charged_pages(submit), charged, num_pages):
                return True
            num_open = self._shares.open_to(lane, charged, num_pages, wanting)
            num_pages = num_open + sum(charged.values())
        return self.memory_fit.fits(arena, num_pages, submit, now_s)

    def prefixes_changed(self, message: PrefixChanged, now_s: float) -> None:
        """What came into an arena, went, or was fetched from others."""
        self.prefixes.change(message, now_s)
        self.links.learn(message.arena_id, message.fetched[:MAX_FETCHED], now_s)

    def metrics(self, now_s: float) -> dict[str, float]:
        """Counters (`_total`) and gauges."""
        counts = {f"placed_{kind}_total": float(count) for kind, count in self._counts.items()}
        return counts | self.prefixes.metrics() | self.links.metrics(now_s)

    def _start_over(self) -> None:
        placing = self._limits.placing
        self.memory_fit = make_memory_fit(placing, self._limits.page_overcommit)
        self._random = random.Random(placing.seed)
        self._router = Router(placing)
        self.links = LinkRates(LinkCost.of_rate(placing.link_mbit_s, placing.link_round_trip_ms))
        self._crossing = CrossingRouter(placing, self.links)

    def _look_up(self, request: ScheduledRequest, pool: Pool, now_s: float) -> _Asked:
        hashes = hashes_from(request.submit.page_hashes)
        depths, sources, addresses = self.prefixes.look_up(hashes), None, pool.pages_addresses
        if hashes and len(addresses) > 1 and self._limits.placing.crossing != "nothing":
            sources = PromptSources(self.prefixes, self.links, addresses, pool.exchanging, hashes, depths, now_s)
        return _Asked(request, pool, now_s, hashes, depths, sources)

    def _sample(self, pool: Pool, places: Sequence[int], depths: PrefixDepths) -> Sequence[PrefillCandidate]:
        """A few of the candidates at these places, and of those with the longest prefix, in the order of the pool."""
        candidates = pool.candidates
        sampled = {places[self._random.randrange(len(places))] for _ in range(_NUM_SAMPLED)}
        _, holders = depths.deepest(pool.arena_ids, _MAX_HOLDERS)
        if holders:
            at_holders = [index for arena_id in holders for index in pool.places[arena_id]]
            sampled |= {at_holders[self._random.randrange(len(at_holders))] for _ in range(_MAX_HOLDERS)}
        return [candidates[index] for index in sorted(sampled)]

    def _try_plan(
        self, asked: _Asked, candidates: Sequence[PrefillCandidate], open_ids: Collection[str] | None
    ) -> PlacementPlan | None:
        """`open_ids`: decode workers with a slot for the request; None: the candidates are a sample. One that meets no
        worker with a slot says nothing of whether a crossing is worth it."""
        request, pool, now_s = asked.request, asked.pool, asked.now_s
        options = self._options(asked, candidates, open_ids)
        if open_ids is None and not options:
            return None
        options.sort(key=_FIRST)
        if asked.sources is not None and pool.senders and self._may_gain_by_crossing(options, pool):
            options += self._crossings(asked, asked.sources, is_choice=bool(options))
            options.sort(key=_FIRST)
        if all(option.is_full for option in options):
            return None
        choice = self._try_choose(request, options, now_s)
        if choice is None:
            return None
        option, decode_worker = choice
        computed_at_s = now_s + option.ttft_ms / 1000
        arena_id = option.candidate.worker.arena.arena_id
        num_cached_pages = asked.depths.num_tokens(arena_id) // PAGE_TOKENS
        self.prefixes.place(arena_id, asked.hashes, now_s, computed_at_s, num_cached_pages)
        if option.crossing is not None:
            self.prefixes.place(decode_worker.arena.arena_id, asked.hashes, now_s, computed_at_s)
        split = next((one for one in options if not one.candidate.is_local), None)
        kind = option.kind(split)
        self._counts[kind] += 1
        return self._plan(request, option, decode_worker, kind)

    def _options(
        self, asked: _Asked, candidates: Sequence[PrefillCandidate], open_ids: Collection[str] | None
    ) -> list[Option]:
        """Each candidate that may prefill the request, with the workers that would decode it.

        One that has as many prompts as it may have is among them only for what it has cached: a request that waits
        for it there waits less than a prefill elsewhere takes.
        """
        request, pool, depths, sources, now_s = asked.request, asked.pool, asked.depths, asked.sources, asked.now_s
        num_prompt_tokens, max_prefills = request.submit.num_prompt_tokens, self._limits.max_prefills
        is_sample = open_ids is None
        all_candidates = candidates if is_sample else pool.candidates
        has_both_kinds = bool(all_candidates) and all_candidates[0].is_local != all_candidates[-1].is_local
        decode_by_host: dict[tuple[WorkerState, ...], Sequence[WorkerState]] = {}
        options: list[Option] = []
        for candidate in candidates:
            worker = candidate.worker
            if request.num_tokens > worker.max_context_tokens:
                continue
            if open_ids is not None and candidate.decode_ids.isdisjoint(open_ids):
                continue
            # The last one is computed.
            num_cached = min(depths.num_tokens(worker.arena.arena_id), num_prompt_tokens - 1)
            if candidate.is_last_resort and not self._must_prefill(asked, candidate, num_cached):
                continue
            is_full, num_prompts = self._fullness(request, worker.prefill, num_prompt_tokens - num_cached)
            if is_full and (not num_cached or num_prompts >= max_prefills):
                continue
            decode = decode_by_host.get(candidate.decode_workers)
            if decode is None:
                decode = self._open_decode_workers(request, candidate.decode_workers, pool.slots, is_sample=is_sample)
                decode_by_host[candidate.decode_workers] = decode
            if decode:
                fetch = None if sources is None else sources.try_fetch(worker)
                option = self._router.option(
                    candidate,
                    decode,
                    request.submit,
                    num_cached,
                    fetch,
                    is_full=is_full,
                    has_both_kinds=has_both_kinds,
                    now_s=now_s,
                )
                options.append(option)
        return options

    def _may_gain_by_crossing(self, options: Sequence[Option], pool: Pool) -> bool:
        """On one host the pages of a prompt do not move: its wait can be shorter elsewhere, or the decoding quicker, by
        more than a crossing adds at least. Where there are many hosts another one is as good."""
        best = next((option for option in options if not option.is_full), None)
        if best is None or best.candidate.is_local:
            return True
        placing, gain_ms = self._limits.placing, best.queue_ms
        if pool.num_choices <= placing.small_pool:
            gain_ms += placing.itl_weight * best.decode_workers[0].busy_itl_ms
        return gain_ms > self._crossing.least_ms(best.candidate.worker)

    def _crossings(self, asked: _Asked, sources: PromptSources, *, is_choice: bool) -> list[Option]:
        """From each sender, or a few of many, to the best decode worker of another host. `is_choice`: there are other
        options."""
        request, senders, receivers = asked.request, asked.pool.senders, self._receivers(asked)
        crossing = CrossingPrompt(request.submit, asked.hashes, asked.depths, sources.reported)
        if len(senders) > _MAX_SENDERS:
            senders = tuple(self._random.sample(senders, _NUM_SAMPLED))
        options = []
        for sender in senders:
            if self._fullness(request, sender.worker.prefill, request.submit.num_prompt_tokens)[0]:
                continue
            for receiver in receivers:
                if receiver.arena.arena_id != sender.worker.arena.arena_id:
                    option = self._crossing.try_option(crossing, sender, receiver, asked.now_s, is_choice=is_choice)
                    options += [] if option is None else [option]
                    break
        return options

    def _receivers(self, asked: _Asked) -> Sequence[WorkerState]:
        """Decode workers with a slot for it, the best first; a few, if they are many."""
        pool = asked.pool
        workers: Sequence[WorkerState] = pool.senders[0].decode_workers
        if len(workers) > self._limits.placing.small_pool:
            workers = pool.open_receivers(pool.slots.open_to(asked.request.priority))
            workers = self._random.sample(workers, min(len(workers), _NUM_SAMPLED))
        return self._open_decode_workers(asked.request, workers, pool.slots, is_sample=False) if workers else ()

    def _must_prefill(self, asked: _Asked, candidate: PrefillCandidate, num_cached: int) -> bool:
        """Whether a decode worker that is not to prefill does: hardly anything is left, or nobody else can in time."""
        if asked.sources is None:
            return True
        crossing = CrossingPrompt(asked.request.submit, asked.hashes, asked.depths, asked.sources.reported)
        is_little = crossing.num_pages * PAGE_TOKENS - num_cached < LEAST_FETCHED_TOKENS
        senders = asked.pool.senders
        return is_little or not self._crossing.can_come(crossing, senders, candidate.worker, asked.now_s)

    def _fullness(self, request: ScheduledRequest, load: PrefillLoad, num_uncached: int) -> tuple[bool, int]:
        """Whether a worker has as many prompts, or tokens of them, as it may have; and how many count."""
        max_prefills, max_tokens = self._limits.max_prefills, self._limits.max_prefill_tokens
        num_prompts, num_tokens = len(load.prompts), load.num_tokens
        if num_prompts >= max_prefills or num_tokens + request.submit.num_prompt_tokens > max_tokens:
            num_prompts, num_tokens = load.ahead_of(request.scheduling.lane_priority)
        is_full = num_prompts > 0 and (num_prompts >= max_prefills or num_tokens + num_uncached > max_tokens)
        if is_full and self._has_share_left(request, load):
            return False, 0
        return is_full, num_prompts

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
        """Those with a slot, the quickest first if it keeps the target, else the one with the most room."""
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
            crossing, sender = option.crossing, option.candidate.worker
            if crossing and not has_room(crossing.num_pages, sender, option.decode_workers[0]):
                continue
            for worker in option.decode_workers:
                arena_id = worker.arena.arena_id
                if arena_id not in refused and self.has_memory(request.lane, request.submit, worker.arena, now_s):
                    return option, worker
                refused.add(arena_id)
        return None

    def _plan(self, request: ScheduledRequest, option: Option, decode_worker: WorkerState, kind: str) -> PlacementPlan:
        submit, source, crossing = request.submit, option.prefix_source, option.crossing
        sender, decode = option.candidate.worker.record, decode_worker.record
        prefill = decode if crossing else sender
        placement = Placement(
            dispatch=submit.dispatch,
            prefill_worker_id=prefill.worker_id,
            prefill_address=prefill.address,
            decode_worker_id=decode.worker_id,
            decode_address=decode.address,
            num_reserved_pages=request.num_pages,
            scheduling=request.scheduling,
            reason=f"{kind}: first token in about {option.ttft_ms:.0f} ms, {option.num_cached_tokens} of "
            f"{submit.num_prompt_tokens} tokens cached{', more from ' if source else ''}{source}",
            prefix_source=source,
            prefix_worker_id=sender.worker_id if crossing else "",
            prefix_worker_address=sender.address if crossing else "",
        )
        return PlacementPlan(
            placement,
            num_charged_pages=self.memory_fit.charged_pages(submit),
            num_cached_tokens=option.num_cached_tokens,
            prefill_ms=option.prefill_ms,
            itl_ms=decode_worker.itl_ms(submit.num_prompt_tokens),
            num_crossing_pages=crossing.num_pages if crossing else 0,
        )

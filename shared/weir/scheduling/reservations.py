"""What granted requests have reserved on each worker, and what each lane has in flight by them."""

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from weir.scheduling.request import PlacementPlan, PriorityKey, ScheduledRequest
from weir.scheduling.running_lengths import RunningLengths

_MAX_MOVED = 64


@dataclass(slots=True)
class DecodeLoad:
    """Reserved on one decode worker: a slot for each request, and pages of its arena."""

    request_ids: set[str] = field(default_factory=set)
    priorities: list[PriorityKey] = field(default_factory=list)
    """Of these requests, ascending."""
    num_pages: int = 0
    """By the worst case."""
    num_context_tokens: int = 0
    pages_by_lane: Counter[str] = field(default_factory=Counter)
    """As the memory fit charges them."""
    lengths: RunningLengths = field(default_factory=RunningLengths)
    num_arriving_pages: int = 0
    """Of those reserved: of prompts that other hosts are computing."""


class _PendingPrompt(NamedTuple):
    granted_at_s: float
    num_tokens: int
    prefill_ms: float
    lane_priority: int
    num_leaving_pages: int


@dataclass(slots=True)
class PrefillLoad:
    """Prompts on one worker that it has not prefilled yet, oldest grant first."""

    prompts: dict[str, _PendingPrompt] = field(default_factory=dict)
    num_tokens: int = 0
    """That are not cached."""
    prefill_ms: float = 0.0
    moved_at_s: float = 0.0
    """When the first one became the first."""
    num_leaving_pages: int = 0
    """Of prompts for decode workers of other hosts, whose requests reserve nothing here."""

    def ahead_of(self, lane_priority: int) -> tuple[int, int]:
        """(prompts, tokens) of lanes at least as urgent: a worker prefills an urgent prompt before all others."""
        ahead = [prompt.num_tokens for prompt in self.prompts.values() if prompt.lane_priority >= lane_priority]
        return len(ahead), sum(ahead)

    def of_lane(self, lane_priority: int) -> tuple[int, int]:
        """(prompts, tokens) of the lane alone, for which a worker keeps a share of its steps."""
        own = [prompt.num_tokens for prompt in self.prompts.values() if prompt.lane_priority == lane_priority]
        return len(own), sum(own)

    def queue_ms(self, now_s: float) -> float:
        """Until all of them are prefilled, by estimate."""
        if not self.prompts:
            return 0.0
        first_ms = next(iter(self.prompts.values())).prefill_ms
        return self.prefill_ms - min(first_ms, (now_s - self.moved_at_s) * 1000)


_NO_PREFILLS = PrefillLoad()


class Reservations:
    """Of granted requests; freeing twice does no harm."""

    def __init__(self) -> None:
        self._requests: dict[str, ScheduledRequest] = {}
        self._decode: dict[str, DecodeLoad] = {}
        self._prefill: dict[str, PrefillLoad] = {}
        self.num_frees = 0
        """Rises whenever something becomes free."""
        self.num_ends = 0
        """Rises whenever a decode slot becomes free."""
        self.num_moves = 0
        """Rises whenever a decode slot is taken or becomes free."""
        self._num_running: Counter[str] = Counter()
        """By lane."""
        self._num_charged_pages: Counter[tuple[str, str]] = Counter()
        """By model and lane; as the memory fit charges them."""
        self._num_prefill_tokens: Counter[tuple[str, str]] = Counter()
        """By model and lane: of prompts that are not prefilled yet, each with one at least."""
        self._expected: dict[str, tuple[ScheduledRequest, PlacementPlan]] = {}
        """Requests that are about to go on elsewhere, and where."""
        self._moved: deque[str] = deque(maxlen=_MAX_MOVED)
        """The decode workers of the latest moves."""

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def num_pages(self) -> int:
        return sum(load.num_pages for load in self._decode.values())

    @property
    def num_prefills(self) -> int:
        return sum(len(load.prompts) for load in self._prefill.values())

    def num_running(self, lane: str) -> int:
        return self._num_running[lane]

    def num_charged_pages(self, model: str, lane: str) -> int:
        return self._num_charged_pages[model, lane]

    def num_prefill_tokens(self, model: str, lane: str) -> int:
        """Of the lane's prompts that are not prefilled yet; 0: there are none."""
        return self._num_prefill_tokens[model, lane]

    def decode_load(self, worker_id: str) -> DecodeLoad:
        """To be read only; the same object as long as the worker is known."""
        load = self._decode.get(worker_id)
        if load is None:
            load = self._decode[worker_id] = DecodeLoad()
        return load

    def prefill_load(self, worker_id: str) -> PrefillLoad:
        """To be read only; the same object as long as the worker is known."""
        load = self._prefill.get(worker_id)
        if load is None:
            load = self._prefill[worker_id] = PrefillLoad()
        return load

    def try_moved_since(self, num_moves: int) -> Sequence[str] | None:
        """The decode workers where slots were taken or became free since there were so many moves; None: too many."""
        num_new = self.num_moves - num_moves
        return None if num_new > len(self._moved) else list(islice(reversed(self._moved), num_new))

    def forget_idle(self, known_ids: Container[str]) -> None:
        """Drops the loads of workers that are not known any more; what is reserved on one of them stays reserved."""
        for worker_id in [i for i, load in self._decode.items() if i not in known_ids and not load.request_ids]:
            del self._decode[worker_id]
        for worker_id in [i for i, load in self._prefill.items() if i not in known_ids and not load.prompts]:
            del self._prefill[worker_id]

    def add(self, request: ScheduledRequest, now_s: float) -> None:
        """By `request.plan`; its prompt counts as not prefilled."""
        plan, submit = request.plan, request.submit
        if plan is None or request.request_id in self._requests:
            raise ValueError(f"request {request.request_id}: has no plan, or has its reservation already")
        placement = plan.placement
        self._requests[request.request_id] = request
        self._num_running[request.lane] += 1
        self._num_charged_pages[submit.model, request.lane] += plan.num_charged_pages
        self._take_slot(request.request_id, request, plan, now_s)
        self.decode_load(placement.decode_worker_id).num_arriving_pages += plan.num_crossing_pages
        prefill = self.prefill_load(placement.reading_worker_id)
        if not prefill.prompts:
            prefill.moved_at_s = now_s
        num_tokens = max(0, submit.num_prompt_tokens - plan.num_cached_tokens)
        prefill.prompts[request.request_id] = _PendingPrompt(
            now_s, num_tokens, plan.prefill_ms, placement.scheduling.lane_priority, plan.num_crossing_pages
        )
        prefill.num_leaving_pages += plan.num_crossing_pages
        self._num_prefill_tokens[submit.model, request.lane] += max(1, num_tokens)
        prefill.num_tokens += num_tokens
        prefill.prefill_ms += plan.prefill_ms

    def mark_prefilled(self, request: ScheduledRequest, now_s: float) -> None:
        """Its first token is there."""
        plan = request.plan
        load = self._prefill.get(plan.placement.reading_worker_id) if plan else None
        prompt = load.prompts.pop(request.request_id, None) if load else None
        if plan is None or load is None or prompt is None:
            return
        self.num_frees += 1
        key = request.submit.model, request.lane
        self._num_prefill_tokens[key] -= max(1, prompt.num_tokens)
        if not self._num_prefill_tokens[key]:
            del self._num_prefill_tokens[key]
        load.num_tokens -= prompt.num_tokens
        load.prefill_ms = load.prefill_ms - prompt.prefill_ms if load.prompts else 0.0
        load.moved_at_s = now_s
        tokens_per_s = 1000 / plan.itl_ms if plan.itl_ms else 0.0
        load.num_leaving_pages -= prompt.num_leaving_pages
        decode = self.decode_load(plan.placement.decode_worker_id)
        decode.num_arriving_pages -= prompt.num_leaving_pages
        decode.num_context_tokens += decode.lengths.start(request.request_id, tokens_per_s, now_s)

    def progressed(self, request_id: str, num_output_tokens: int, now_s: float) -> None:
        """A report of how far a request is."""
        request = self._requests.get(request_id)
        if request is None or request.placement is None:
            return
        load = self.decode_load(request.placement.decode_worker_id)
        load.num_context_tokens += load.lengths.progressed(request_id, num_output_tokens, now_s)

    def settle_prefills(self, worker_id: str, num_on_worker: int, granted_before_s: float, now_s: float) -> None:
        """The worker itself reports how many it has: of the grants that must have reached it, the oldest are done."""
        prompts = self._prefill.get(worker_id, _NO_PREFILLS).prompts
        reached = [request_id for request_id, prompt in prompts.items() if prompt.granted_at_s < granted_before_s]
        for request_id in reached[: max(0, len(reached) - num_on_worker)]:
            self.mark_prefilled(self._requests[request_id], now_s)

    def remove(self, request: ScheduledRequest, now_s: float) -> None:
        self.mark_prefilled(request, now_s)
        plan = request.plan
        if plan is None or self._requests.pop(request.request_id, None) is None:
            return
        self._num_running[request.lane] -= 1
        key = request.submit.model, request.lane
        self._num_charged_pages[key] -= plan.num_charged_pages
        if not self._num_charged_pages[key]:
            del self._num_charged_pages[key]
        self._free_slot(request.request_id, request, plan)

    def expect(self, request: ScheduledRequest, plan: PlacementPlan, now_s: float) -> None:
        """A granted request is about to go on under this plan: it has room there too, until `expect_no_more`."""
        self.expect_no_more(request.request_id)
        self._expected[request.request_id] = request, plan
        slot_id, load = _expected_id(request.request_id), self.decode_load(plan.placement.decode_worker_id)
        self._take_slot(slot_id, request, plan, now_s)
        load.num_context_tokens += load.lengths.progressed(slot_id, request.num_output_tokens, now_s)

    def expect_no_more(self, request_id: str) -> None:
        """It is there, or is not coming."""
        expected = self._expected.pop(request_id, None)
        if expected is not None:
            self._free_slot(_expected_id(request_id), *expected)

    def requests_on(self, worker_id: str) -> list[ScheduledRequest]:
        """All on a decode worker, those that are not prefilled yet on a prefill worker."""
        decode, prefill = self._decode.get(worker_id), self._prefill.get(worker_id)
        ids = sorted((decode.request_ids if decode else set()) | (prefill.prompts.keys() if prefill else set()))
        return [self._requests[request_id] for request_id in ids if request_id in self._requests]

    def check_integrity(self) -> list[str]:
        """What does not add up."""
        errors = []
        placements = {request_id: request.placement for request_id, request in self._requests.items()}
        placements |= {_expected_id(request_id): plan.placement for request_id, (_, plan) in self._expected.items()}
        for worker_id, load in self._decode.items():
            mine = {i: p for i, p in placements.items() if p is not None and p.decode_worker_id == worker_id}
            if mine.keys() != load.request_ids or sum(p.num_reserved_pages for p in mine.values()) != load.num_pages:
                errors.append(f"decode worker {worker_id}: {load.num_pages} pages reserved by {len(load.request_ids)}")
            if not len(mine) == len(load.priorities) == len(load.lengths) or (not mine and load.num_context_tokens):
                errors.append(f"decode worker {worker_id}: {len(mine)} requests, {len(load.priorities)} priorities")
            if any(num_pages < 0 for num_pages in load.pages_by_lane.values()):
                errors.append(f"decode worker {worker_id}: lanes are charged {dict(load.pages_by_lane)} pages")
        if sum(len(load.request_ids) for load in self._decode.values()) != len(placements):
            errors.append(f"{len(self._requests)} requests are granted, not as many decode slots are reserved")
        running = Counter(request.lane for request in self._requests.values())
        if +self._num_running != running:
            errors.append(f"lanes count {dict(+self._num_running)} in flight, there are {dict(running)}")
        for worker_id, prefill in self._prefill.items():
            tokens = [prompt.num_tokens for request_id, prompt in prefill.prompts.items() if request_id in placements]
            if len(tokens) != len(prefill.prompts) or sum(tokens) != prefill.num_tokens:
                errors.append(f"prefill worker {worker_id}: {prefill.num_tokens} tokens of {len(prefill.prompts)}")
            if sum(prompt.num_leaving_pages for prompt in prefill.prompts.values()) != prefill.num_leaving_pages:
                errors.append(f"prefill worker {worker_id}: {prefill.num_leaving_pages} pages leave it")
        num_arriving = sum(load.num_arriving_pages for load in self._decode.values())
        if num_arriving != sum(load.num_leaving_pages for load in self._prefill.values()):
            errors.append(f"{num_arriving} pages arrive, not as many leave")
        return errors

    def _take_slot(self, slot_id: str, request: ScheduledRequest, plan: PlacementPlan, now_s: float) -> None:
        """Of a decode worker, and pages of its arena."""
        placement, submit = plan.placement, request.submit
        self._slot_moved(placement.decode_worker_id)
        load = self.decode_load(placement.decode_worker_id)
        load.request_ids.add(slot_id)
        insort(load.priorities, _priority_at_worker(plan))
        load.num_pages += placement.num_reserved_pages
        load.num_context_tokens += submit.num_prompt_tokens
        load.pages_by_lane[request.lane] += plan.num_charged_pages
        load.lengths.add(slot_id, submit.num_prompt_tokens, submit.max_tokens, submit.predicted_output_tokens, now_s)

    def _free_slot(self, slot_id: str, request: ScheduledRequest, plan: PlacementPlan) -> None:
        self.num_frees += 1
        self.num_ends += 1
        self._slot_moved(plan.placement.decode_worker_id)
        load = self.decode_load(plan.placement.decode_worker_id)
        load.request_ids.discard(slot_id)
        del load.priorities[bisect_left(load.priorities, _priority_at_worker(plan))]
        load.num_pages -= plan.placement.num_reserved_pages
        load.pages_by_lane[request.lane] -= plan.num_charged_pages
        load.num_context_tokens -= request.submit.num_prompt_tokens + load.lengths.num_reported(slot_id)
        load.lengths.remove(slot_id)

    def _slot_moved(self, worker_id: str) -> None:
        self.num_moves += 1
        self._moved.append(worker_id)


def _expected_id(request_id: str) -> str:
    """By which a load knows what is about to come to it."""
    return f"{request_id} expected"


def _priority_at_worker(plan: PlacementPlan) -> PriorityKey:
    """Of the grant: of a request that an earlier scheduler granted, that one's."""
    scheduling = plan.placement.scheduling
    return -scheduling.lane_priority, scheduling.rank

"""Whether a request may wait, and go on waiting.

What can never start or has no room to wait is refused at once. What would wait for longer than it may is given up when
that is estimated, not after it has waited for nothing: from the least urgent lane up, and there the latest first.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import NamedTuple

from weir.bus.messages import RefusalReason, Submit
from weir.scheduling.commands import WORKER_RETRY_MS, Refusal
from weir.scheduling.lifecycle import RequestLifecycle
from weir.scheduling.limits import CoreLimits
from weir.scheduling.placer import Placer
from weir.scheduling.prefix_view import hashes_from
from weir.scheduling.request import ScheduledRequest, num_reserved_pages
from weir.scheduling.request_table import RequestTable

_WINDOW_S = 30.0
_MAX_FINISHES = 4096
_MIN_FINISHES = 20
_UNKNOWN_RETRY_MS = 1000
_MIN_RETRY_MS = 100
_MAX_RETRY_MS = 30_000
_DEADLINE_DOUBT = 1.25
"""An estimate is held against a request only where it is over the bound by this factor."""
_WAIT_DOUBT = 1.5
"""An estimated wait must be this many times too long."""
_MAX_SHED_AT_ONCE = 256


class _FinishRate:
    """Requests that ended lately, as a rate."""

    def __init__(self) -> None:
        self._finished_at_s: deque[float] = deque(maxlen=_MAX_FINISHES)
        self._num_backlogged = 0
        """Of the latest, those that ended while others waited."""

    def add(self, now_s: float, *, is_backlogged: bool) -> None:
        self._finished_at_s.append(now_s)
        self._num_backlogged = self._num_backlogged + 1 if is_backlogged else 0

    def per_s(self, now_s: float) -> float:
        """0.0: not known, by fewer than two."""
        return self._per_s(_MAX_FINISHES, 2, now_s)

    def backlogged_per_s(self, now_s: float) -> float:
        """Since somebody has been waiting all the time: without a backlog requests end as they come, which says
        nothing of how many could. 0.0: not known, by too few."""
        return self._per_s(self._num_backlogged, _MIN_FINISHES, now_s)

    def _per_s(self, num_latest: int, min_finishes: int, now_s: float) -> float:
        finished_at_s = self._finished_at_s
        while finished_at_s and finished_at_s[0] < now_s - _WINDOW_S:
            finished_at_s.popleft()
        num_finishes = min(num_latest, len(finished_at_s))
        if num_finishes < min_finishes:
            return 0.0
        return num_finishes / max(now_s - finished_at_s[-num_finishes], 0.001)


class Rates:
    """How fast requests of each model end, and so how long it takes until it is somebody's turn.

    At most `max_models` are known; the one without a request for the longest time goes first.
    """

    def __init__(self, max_models: int) -> None:
        self._max_models = max_models
        self._rates: OrderedDict[str, _FinishRate] = OrderedDict()

    def add(self, model: str, now_s: float, *, is_backlogged: bool) -> None:
        """A request of the model ended; `is_backlogged`: others wait."""
        rate = self._rates.get(model)
        if rate is None:
            rate = self._rates[model] = _FinishRate()
            if len(self._rates) > self._max_models:
                self._rates.popitem(last=False)
        self._rates.move_to_end(model)
        rate.add(now_s, is_backlogged=is_backlogged)

    def retry_after_ms(self, model: str, num_ahead: float, now_s: float) -> int:
        """When `num_ahead` requests will have ended, at the rate of the last 30 s; between 0.1 and 30 s."""
        rate = self._rates.get(model)
        per_s = rate.per_s(now_s) if rate else 0.0
        if per_s == 0.0:
            return _UNKNOWN_RETRY_MS
        return int(min(max(1000 * num_ahead / per_s, _MIN_RETRY_MS), _MAX_RETRY_MS))

    def wait_s(self, model: str, num_ahead: int, now_s: float) -> float:
        """How long `num_ahead` requests take; 0.0: too few have ended since there is a backlog to say."""
        rate = self._rates.get(model)
        per_s = rate.backlogged_per_s(now_s) if rate else 0.0
        return num_ahead / per_s if per_s else 0.0


class _Completion(NamedTuple):
    """From the grant on, on the best worker."""

    first_token_ms: float
    alone_ms: float
    """The first token on a worker that has nothing else to do."""
    end_ms: float


class _DeadlineEstimator:
    """When a request would have its first token and its end, by the costs that workers have measured of their own
    steps; without them it refuses nobody."""

    def __init__(self, limits: CoreLimits, placer: Placer) -> None:
        self._limits = limits
        self._pools = placer.pools
        self._prefixes = placer.prefixes

    def try_refuse(self, submit: Submit, lane: str, wait_ms: float, now_s: float) -> Refusal | None:
        """`wait_ms`: for those before it in the queue. None: it may be in time, has no deadline, or takes what there
        is at it: then it waits as long as its lane allows."""
        has_bound = submit.deadline_ms and not submit.takes_partial
        estimated = self._try_estimate(submit, lane, now_s) if has_bound else None
        if estimated is None:
            return None
        bounds = [("its deadline", submit.deadline_ms, estimated.end_ms)]
        if submit.ttft_target_ms:
            bounds.append(("its target for the first token", submit.ttft_target_ms, estimated.first_token_ms))
        for name, bound_ms, needed_ms in bounds:
            if wait_ms + needed_ms <= bound_ms * _DEADLINE_DOUBT:
                continue
            could_ever = needed_ms - estimated.first_token_ms + estimated.alone_ms <= bound_ms
            message = f"it would take about {wait_ms + needed_ms:.0f} ms, {name} is in {bound_ms} ms"
            retry_after_ms = max(100, int(wait_ms + needed_ms - bound_ms)) if could_ever else 0
            return Refusal(RefusalReason.DEADLINE, message, retry_after_ms)
        return None

    def _try_estimate(self, submit: Submit, lane: str, now_s: float) -> _Completion | None:
        """None: not every worker has measured its cost, so that one may be quicker than is known."""
        pool = self._pools.pool(submit.model, self._limits.lanes_by_name[lane].worker_group)
        depths = self._prefixes.look_up(hashes_from(submit.page_hashes))
        best: _Completion | None = None
        for candidate in pool.candidates:
            worker = candidate.worker
            if not worker.is_measured or not all(one.is_measured for one in candidate.decode_workers):
                return None
            num_cached = min(depths.num_tokens(worker.arena.arena_id), submit.num_prompt_tokens - 1)
            alone_ms = worker.prefill_ms(submit.num_prompt_tokens - num_cached, num_cached)
            if not candidate.is_local:
                alone_ms += self._limits.placing.hand_off_time_ms(submit.num_prompt_tokens)
            first_ms = worker.prefill.queue_ms(now_s) + alone_ms
            if best is None or first_ms < best.first_token_ms:
                itl_ms = min(one.itl_ms(submit.num_prompt_tokens) for one in candidate.decode_workers)
                best = _Completion(first_ms, alone_ms, first_ms + itl_ms * (_expected_tokens(submit) - 1))
        return best


def _expected_tokens(submit: Submit) -> float:
    """Not the most that it may ask for: most requests end before. One, where nobody expects anything."""
    expected = submit.predicted_output_tokens or submit.expected_output_tokens or 1.0
    return max(1.0, min(expected, submit.max_tokens))


class Admission:
    """Refuses at once what can never start, or would wait where there is no room to wait."""

    def __init__(self, limits: CoreLimits, requests: RequestTable, placer: Placer, rates: Rates) -> None:
        self._limits = limits
        self._requests = requests
        self._pools = placer.pools
        self._rates = rates
        self._deadlines = _DeadlineEstimator(limits, placer)

    def try_refuse(self, submit: Submit, *, is_gathering: bool, now_s: float) -> Refusal | None:
        """None: it may wait."""
        name = self._requests.lane_of(submit)
        lane, tenant = self._limits.lanes_by_name.get(name), self._limits.tenant(submit.tenant)
        if lane is None:
            known = ", ".join(self._limits.lanes_by_name)
            return Refusal(RefusalReason.UNKNOWN_LANE, f"lane {name!r} is none of {known}")
        if tenant.lanes and name not in tenant.lanes:
            message = f"lane {name!r}: tenant {tenant.name} may use {', '.join(tenant.lanes)}"
            return Refusal(RefusalReason.LANE_FORBIDDEN, message)
        refusal = None if is_gathering else self._try_refuse_for_workers(submit, lane.worker_group)
        refusal = refusal or self._try_refuse_for_room(submit, name, tenant.name, now_s)
        if refusal is not None or is_gathering or not submit.deadline_ms:
            return refusal
        return self._try_refuse_for_time(submit, name, tenant.name, now_s)

    def _try_refuse_for_workers(self, submit: Submit, group: str) -> Refusal | None:
        """Its gateway knows whether there is such a model; a leader that has just begun may know of no worker of it."""
        model = submit.model
        pool = self._pools.pool(model, group)
        if not pool.host_sizes:
            message = f"no host has workers that can prefill and decode for model {model!r} now"
            return Refusal(RefusalReason.NO_WORKER, message, WORKER_RETRY_MS)
        num_tokens, num_pages = submit.num_prompt_tokens + submit.max_tokens, num_reserved_pages(submit)
        if not pool.can_ever_hold(num_tokens, num_pages):
            most_pages, most_tokens = (max(sizes) for sizes in zip(*pool.host_sizes, strict=True))
            message = (
                f"prompt {submit.num_prompt_tokens} + max_tokens {submit.max_tokens} = {num_tokens} tokens "
                f"({num_pages} pages): the largest host holds {most_pages} pages "
                f"and {most_tokens} tokens of context; ask for fewer"
            )
            return Refusal(RefusalReason.TOO_LARGE, message)
        return None

    def _try_refuse_for_time(self, submit: Submit, name: str, tenant: str, now_s: float) -> Refusal | None:
        num_ahead = self._requests.lanes.num_ahead(submit.model, name, tenant)
        wait_ms = 1000 * self._rates.wait_s(submit.model, num_ahead, now_s)
        return self._deadlines.try_refuse(submit, name, wait_ms, now_s)

    def _try_refuse_for_room(self, submit: Submit, name: str, tenant: str, now_s: float) -> Refusal | None:
        lanes, model = self._requests.lanes, submit.model
        if lanes.is_full(name):
            message = f"lane {name} is full: {self._limits.lanes_by_name[name].max_queued} requests wait"
            retry_after_ms = self._rates.retry_after_ms(model, lanes.num_ahead(model, name), now_s)
            return Refusal(RefusalReason.QUEUE_FULL, message, retry_after_ms)
        over = self._requests.tenants.try_over_quota(tenant, submit, now_s)
        if over is None:
            return None
        if over.wait_s is None:
            # One of its own leaves about when as many have left as there are tenants that take turns.
            retry_after_ms = self._rates.retry_after_ms(model, lanes.num_tenants(model, name), now_s)
        else:
            retry_after_ms = int(over.wait_s * 1000) + 1
        return Refusal(RefusalReason.QUOTA, over.message, retry_after_ms, over.bound)


class Shedding:
    """Gives up what waits and would wait for too long, and the least urgent where all queues together are full."""

    def __init__(self, limits: CoreLimits, requests: RequestTable, rates: Rates, life: RequestLifecycle) -> None:
        self._limits = limits
        self._requests = requests
        self._rates = rates
        self._life = life

    def try_refuse(self, submit: Submit, now_s: float) -> Refusal | None:
        """None: a new request may wait. Where all queues together are full, somebody less urgent is revoked for it."""
        lane = self._requests.lane_of(submit)
        max_wait_s = self._limits.lanes_by_name[lane].max_wait_s
        if submit.deadline_ms:
            max_wait_s = min(max_wait_s, submit.deadline_ms / 1000)
        num_queued = len(self._requests.lanes)
        # No more are ahead of it than wait at all, and mostly that is not too many.
        if num_queued < self._limits.max_queued and self._is_soon(submit.model, num_queued, max_wait_s, now_s):
            return None
        tenant = self._limits.tenant(submit.tenant).name
        num_ahead = self._requests.lanes.num_ahead(submit.model, lane, tenant)
        refusal = self._try_shed(submit.model, lane, num_ahead, max_wait_s, now_s)
        if refusal is not None or len(self._requests.lanes) < self._limits.max_queued:
            return refusal
        victim = self._try_victim(lane)
        if victim is None:
            return self._full(submit.model, lane, now_s)
        self._life.revoke(victim, self._full(victim.submit.model, victim.lane, now_s), now_s)
        return None

    def give_up(self, now_s: float) -> None:
        """Revokes queued requests that have waited too long, or will have before it is their turn."""
        for request in self._requests.lanes.expired(now_s):
            message = f"lane {request.lane} had no room for it within {now_s - request.queued_at_s:.1f} s"
            model = request.submit.model
            num_ahead = self._requests.lanes.num_ahead(model, request.lane)
            retry_after_ms = self._rates.retry_after_ms(model, num_ahead, now_s)
            self._life.revoke(request, Refusal(RefusalReason.WAITED_TOO_LONG, message, retry_after_ms), now_s)
        for request, refusal in self._overdue(now_s):
            self._life.revoke(request, refusal, now_s)

    def _overdue(self, now_s: float) -> Iterator[tuple[ScheduledRequest, Refusal]]:
        """The least urgent and latest first; the caller removes each before it takes the next. Bounded in number."""
        lanes = self._requests.lanes
        num_left = _MAX_SHED_AT_ONCE
        for model in lanes.models():
            for lane in reversed(self._limits.lanes):
                while num_left and (request := lanes.newest_of(lane.name, model)) is not None:
                    num_ahead = lanes.num_ahead(model, lane.name, request.tenant, is_queued=True)
                    refusal = self._try_shed(model, lane.name, num_ahead, request.expires_at_s - now_s, now_s)
                    if refusal is None:
                        break
                    num_left -= 1
                    yield request, refusal

    def _is_soon(self, model: str, num_ahead: int, max_wait_s: float, now_s: float) -> bool:
        """Whether so many do not take too long, by estimate."""
        return self._rates.wait_s(model, num_ahead, now_s) <= _WAIT_DOUBT * max_wait_s

    def _try_shed(self, model: str, lane: str, num_ahead: int, max_wait_s: float, now_s: float) -> Refusal | None:
        """None: by estimate a request of the lane does not wait for too long, with so many before it."""
        wait_s = self._rates.wait_s(model, num_ahead, now_s)
        if wait_s <= _WAIT_DOUBT * max_wait_s:
            return None
        message = f"lane {lane}: {num_ahead} requests first take about {wait_s:.0f} s, it may wait {max_wait_s:.0f} s"
        num_too_many = num_ahead * (1 - max_wait_s / wait_s)
        return Refusal(RefusalReason.SHED, message, self._rates.retry_after_ms(model, num_too_many, now_s))

    def _try_victim(self, lane: str) -> ScheduledRequest | None:
        """The latest of the least urgent lane below this one that has any."""
        for other in reversed(self._limits.lanes):
            if other.name == lane:
                return None
            victim = self._requests.lanes.newest_of(other.name)
            if victim is not None:
                return victim
        return None

    def _full(self, model: str, lane: str, now_s: float) -> Refusal:
        message = f"{self._limits.max_queued} requests wait in all lanes, and lane {lane} is the least urgent of them"
        num_ahead = self._requests.lanes.num_ahead(model, lane)
        return Refusal(RefusalReason.SHED, message, self._rates.retry_after_ms(model, num_ahead, now_s))

"""What each policy's order means, written plainly: queues that look at everybody who waits for each pick.

What a request ranks by when it comes is asked of the order itself; the rules of ranks have tests of their own.
"""

import math
from collections.abc import Callable
from typing import Protocol

from weir.policy.seams import Waiting

THRESHOLD_PICKS, PERIOD = 9, 3
"""Of starvation control, in place of its defaults: so that few picks show it."""
GUARD = {"threshold_picks": float(THRESHOLD_PICKS), "period": float(PERIOD)}

Rank = Callable[[Waiting], float]


class PlainQueue(Protocol):
    """As an `OrderQueue`."""

    def add(self, request: Waiting) -> None: ...
    def discard(self, request_id: str) -> None: ...
    def try_peek(self, now_s: float) -> str | None: ...
    def take(self, request_id: str, now_s: float) -> None: ...


class Ranked:
    """Least rank first, ties by arrival, then by id."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self.waiting: dict[str, tuple[float, Waiting]] = {}
        """By id, with the rank that it came with."""

    def add(self, request: Waiting) -> None:
        self.waiting[request.request_id] = self._rank(request), request

    def discard(self, request_id: str) -> None:
        self.waiting.pop(request_id, None)

    def try_peek(self, now_s: float) -> str | None:
        return min(self.waiting, key=self.place_of, default=None)

    def take(self, request_id: str, now_s: float) -> None:
        del self.waiting[request_id]

    def place_of(self, request_id: str) -> tuple[float, float, str]:
        rank, request = self.waiting[request_id]
        return rank, request.arrived_at_s, request_id


class HighestRatio(Ranked):
    """Magnus's: ranks are serving times, rounded to powers of 1.2; who has waited most of them goes first."""

    def try_peek(self, now_s: float) -> str | None:
        def place_of(request_id: str) -> tuple[float, float, str]:
            rank, request = self.waiting[request_id]
            serving_s = math.exp(round(math.log(rank) / math.log1p(0.2)) * math.log1p(0.2))
            return (request.arrived_at_s - now_s) / serving_s, request.arrived_at_s, request_id

        return min(self.waiting, key=place_of, default=None)


class PrefillRate:
    """The hybrid's, which all queues of an order share: 85,000 tokens in 10 s, then what is seen."""

    def __init__(self) -> None:
        self.num_tokens, self.seconds = 85_000.0, 10.0
        self.busy_since_s: float | None = None

    def took(self, num_tokens: int, now_s: float, *, others_wait: bool) -> None:
        if self.busy_since_s is not None:
            self.num_tokens = 0.995 * self.num_tokens + num_tokens
            self.seconds = 0.995 * self.seconds + (now_s - self.busy_since_s)
        self.busy_since_s = now_s if others_wait else None


class Relegating(Ranked):
    """The hybrid's: whoever is first and can be in time no more goes behind all others, for good."""

    def __init__(self, rank: Rank, rate: PrefillRate) -> None:
        super().__init__(rank)
        self._rate = rate
        self._relegated: set[str] = set()

    def try_peek(self, now_s: float) -> str | None:
        for request_id in sorted(self.waiting.keys() - self._relegated, key=self.place_of):
            request = self.waiting[request_id][1]
            due_s = request.ttft_deadline_s
            if due_s == math.inf:
                due_s = request.arrived_at_s + 30
            if now_s + request.num_uncached_tokens / (self._rate.num_tokens / self._rate.seconds) <= due_s:
                return request_id
            self._relegated.add(request_id)
        return super().try_peek(now_s)

    def discard(self, request_id: str) -> None:
        super().discard(request_id)
        self._relegated.discard(request_id)

    def take(self, request_id: str, now_s: float) -> None:
        request = self.waiting[request_id][1]
        self.discard(request_id)
        self._rate.took(request.num_uncached_tokens, now_s, others_wait=bool(self.waiting))


class Bucketed(Ranked):
    """32 of one bucket of uncached lengths, then the bucket whose head is oldest. Bounds: 128 doubled six times."""

    _served, _num_left = 0, 0

    def try_peek(self, now_s: float) -> str | None:
        own = [one for one in self.waiting if self._bucket_of(one) == self._served] if self._num_left else []
        return min(own or self.waiting, key=self._age_of, default=None)

    def take(self, request_id: str, now_s: float) -> None:
        bucket = self._bucket_of(request_id)
        goes_on = bucket == self._served and self._num_left > 0
        self._served, self._num_left = bucket, (self._num_left if goes_on else 32) - 1
        super().take(request_id, now_s)

    def _bucket_of(self, request_id: str) -> int:
        return sum(self.waiting[request_id][1].num_uncached_tokens > 128 * 2**number for number in range(7))

    def _age_of(self, request_id: str) -> tuple[float, str]:
        return self.waiting[request_id][1].arrived_at_s, request_id


class Guarded:
    """With starvation control: in each `PERIOD`-th pick at most, whoever was passed over most and often enough."""

    def __init__(self, inner: Ranked) -> None:
        self._inner = inner
        self._came_at_pick: dict[str, int] = {}
        self._num_picks = 0
        self._num_since_turn = PERIOD

    def add(self, request: Waiting) -> None:
        self._inner.add(request)
        self._came_at_pick[request.request_id] = self._num_picks

    def discard(self, request_id: str) -> None:
        self._inner.discard(request_id)
        self._came_at_pick.pop(request_id, None)

    def try_peek(self, now_s: float) -> str | None:
        return self._try_starving() or self._inner.try_peek(now_s)

    def take(self, request_id: str, now_s: float) -> None:
        self._num_since_turn = 1 if request_id == self._try_starving() else self._num_since_turn + 1
        self._inner.take(request_id, now_s)
        del self._came_at_pick[request_id]
        self._num_picks += 1

    def _try_starving(self) -> str | None:
        if self._num_since_turn < PERIOD:
            return None
        waiting = self._inner.waiting
        starving = [one for one, at_pick in self._came_at_pick.items() if self._num_picks - at_pick >= THRESHOLD_PICKS]
        place = {one: (self._came_at_pick[one], waiting[one][1].arrived_at_s, one) for one in starving}
        return min(starving, key=lambda one: place[one], default=None)

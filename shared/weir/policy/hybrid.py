"""Niyama's hybrid of deadlines and sizes (Goel et al., arXiv 2503.22562).

Order: deadline + alpha * uncached tokens, between earliest deadline (alpha 0) and shortest first. Eager relegation: a
request that cannot meet its deadline any more when its turn comes goes behind all that can, and is served still; this
stops the domino effect of plain EDF. Chunks follow the slack of the decodes beside them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from weir.policy.dynamic_chunk import DynamicChunk
from weir.policy.edf import deadline_s
from weir.policy.keyed_queue import KeyedQueue
from weir.policy.params import bounded
from weir.policy.seams import OrderQueue, Policy, Waiting
from weir.policy.starvation import StarvationParams, guarded


@dataclass(frozen=True, slots=True)
class HybridParams(StarvationParams):
    """`default_*`: of requests without a target of their own. `tokens_per_s`: how fast prompts are prefilled, until it
    has been measured."""

    alpha_s_per_token: float = bounded(0.0005, 0)
    relegation: bool = True
    default_ttft_s: float = bounded(30.0, 0)
    default_itl_s: float = bounded(0.2, 0)
    tokens_per_s: float = bounded(8500.0, 1)
    dynamic_chunk: bool = True


def make(params: HybridParams) -> Policy:
    step_budget = DynamicChunk(params.default_itl_s) if params.dynamic_chunk else None
    return Policy("hybrid", HybridOrder(params), gate=None, step_budget=step_budget)


class HybridOrder:
    """All queues share one estimate of how fast prompts are prefilled."""

    def __init__(self, params: HybridParams) -> None:
        self._params = params
        self._rate = _PrefillRate(params.tokens_per_s)

    def new_queue(self) -> OrderQueue:
        return guarded(_RelegatingQueue(self.rank, self._can_meet, self._rate), self._params)

    def rank(self, request: Waiting) -> float:
        due_s = deadline_s(request, self._params.default_ttft_s)
        return due_s + self._params.alpha_s_per_token * request.num_uncached_tokens

    def finished(self, request: Waiting, num_output_tokens: int, now_s: float) -> None:
        """The prefill rate is learned when requests are taken."""

    def _can_meet(self, request: Waiting, now_s: float) -> bool:
        due_s = deadline_s(request, self._params.default_ttft_s)
        return not self._params.relegation or now_s + request.num_uncached_tokens / self._rate.tokens_per_s <= due_s


class _PrefillRate:
    """Tokens of prompts a second while something waits: a mean over the past that decays by 0.995 a request."""

    _DECAY = 0.995
    _PRIOR_S = 10.0

    def __init__(self, tokens_per_s: float) -> None:
        self._tokens = tokens_per_s * self._PRIOR_S
        self._seconds = self._PRIOR_S
        self._busy_since_s: float | None = None

    @property
    def tokens_per_s(self) -> float:
        return self._tokens / self._seconds

    def took(self, num_tokens: int, now_s: float, is_backlogged: bool) -> None:
        """A request started; `is_backlogged`: others go on waiting, so the time to the next start is prefill time."""
        if self._busy_since_s is not None:
            self._tokens = self._DECAY * self._tokens + num_tokens
            self._seconds = self._DECAY * self._seconds + (now_s - self._busy_since_s)
        self._busy_since_s = now_s if is_backlogged else None


class _RelegatingQueue:
    """Looks at the first alone: only who is about to be taken need be judged, and each is relegated once at most."""

    def __init__(
        self, key_of: Callable[[Waiting], float], can_meet: Callable[[Waiting, float], bool], rate: _PrefillRate
    ) -> None:
        self._can_meet = can_meet
        self._rate = rate
        self._timely = KeyedQueue(lambda request: (key_of(request),))
        self._relegated = KeyedQueue(lambda request: (key_of(request),))

    def __len__(self) -> int:
        return len(self._timely) + len(self._relegated)

    def ids(self) -> list[str]:
        return self._timely.ids() + self._relegated.ids()

    def add(self, request: Waiting) -> None:
        if request.request_id in self._relegated:
            raise ValueError(f"{request.request_id} is in the queue already")
        self._timely.add(request)

    def discard(self, request_id: str) -> None:
        self._timely.discard(request_id)
        self._relegated.discard(request_id)

    def try_peek(self, now_s: float) -> str | None:
        while (head := self._timely.try_peek_request()) is not None:
            if self._can_meet(head, now_s):
                return head.request_id
            self._timely.discard(head.request_id)
            self._relegated.add(head)
        return self._relegated.try_peek(now_s)

    def take(self, request_id: str, now_s: float) -> None:
        request = self._timely.try_get(request_id) or self._relegated.try_get(request_id)
        assert request is not None, f"{request_id} is not in the queue"
        self.discard(request_id)
        self._rate.took(request.num_uncached_tokens, now_s, len(self) > 0)

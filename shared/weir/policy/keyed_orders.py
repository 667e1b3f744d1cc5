"""Orders by a key that a request gets once, and the policies that are nothing but such an order.

fcfs             by arrival, which every queue falls back to: what everything else is measured against
shortest-prompt  least uncached tokens first. Needs no model, and is the yardstick for time to first token
edf              earliest deadline first. Best where all deadlines can be met; under overload it serves those first that
                 are about to be late, and makes them all late (the domino effect), which `hybrid` cures
ltr              shortest predicted answer first, by a score that need only rank well. Fu, Zhu, Su, Qiao, Stoica,
                 Zhang: "Efficient LLM Scheduling by Learning to Rank", arXiv 2408.15792
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from weir.policy.estimators import RecentMean
from weir.policy.params import NoParams, bounded, check_bounds
from weir.policy.seams import OrderQueue, Policy, Waiting
from weir.policy.sorted_ids import SortedIds
from weir.policy.starvation import StarvationParams, guarded

Key = tuple[float, ...]
KeyOf = Callable[[Waiting], Key]


class KeyedQueue:
    """Smallest key first, ties by arrival, then by id.

    A key may age at no cost: subtracting `rate * waited` from all keys keeps their order if `rate * arrived_at_s` is
    added to each of them once.
    """

    def __init__(self, key_of: KeyOf) -> None:
        self._key_of = key_of
        self._requests: SortedIds[Key] = SortedIds()

    def __len__(self) -> int:
        return len(self._requests)

    def ids(self) -> list[str]:
        return self._requests.ids()

    def add(self, request: Waiting) -> None:
        self._requests.add(request.request_id, (*self._key_of(request), request.arrived_at_s))

    def discard(self, request_id: str) -> None:
        self._requests.discard(request_id)

    def try_peek(self, now_s: float) -> str | None:
        del now_s
        ascending = self._requests.ascending
        return ascending[0][1] if ascending else None

    def try_first(self) -> tuple[float, str] | None:
        """When the one that `try_peek` names came, and its id."""
        ascending = self._requests.ascending
        return (ascending[0][0][-1], ascending[0][1]) if ascending else None

    def take(self, request_id: str, now_s: float) -> None:
        del now_s
        self._requests.discard(request_id)


class KeyedOrder:
    """An order whose queues share nothing, with starvation control if `starvation` has it on.

    `rank` is the first number of a key.
    """

    def __init__(self, key_of: KeyOf, starvation: StarvationParams | None = None) -> None:
        self._key_of = key_of
        self._starvation = starvation

    def new_queue(self) -> OrderQueue:
        queue = KeyedQueue(self._key_of)
        return queue if self._starvation is None else guarded(queue, self._starvation)

    def rank(self, request: Waiting) -> float:
        return next(iter(self._key_of(request)), 0.0)

    def finished(self, request: Waiting, num_output_tokens: int, now_s: float) -> None:
        """Nothing is learned."""


def make_fcfs(params: NoParams) -> Policy:
    del params
    return Policy("fcfs", fcfs_order(), gate=None, step_budget=None, reads_cache=False)


def fcfs_order() -> KeyedOrder:
    return KeyedOrder(lambda request: ())


def make_shortest_prompt(params: StarvationParams) -> Policy:
    return Policy("shortest-prompt", shortest_prompt_order(params), gate=None, step_budget=None)


def shortest_prompt_order(params: StarvationParams) -> KeyedOrder:
    return KeyedOrder(lambda request: (float(request.num_uncached_tokens),), params)


@dataclass(frozen=True, slots=True)
class EdfParams:
    """`default_ttft_s`: when a request without a target is due after its arrival. Being finite it lets nobody starve:
    whatever arrives later than a request's deadline comes after it."""

    default_ttft_s: float = bounded(30.0, 0)

    def __post_init__(self) -> None:
        check_bounds(self)


def make_edf(params: EdfParams) -> Policy:
    order = KeyedOrder(lambda request: (deadline_s(request, params.default_ttft_s),))
    return Policy("edf", order, gate=None, step_budget=None, reads_cache=False)


def deadline_s(request: Waiting, default_ttft_s: float) -> float:
    """When the first token is due."""
    if request.ttft_deadline_s < math.inf:
        return request.ttft_deadline_s
    return request.arrived_at_s + default_ttft_s


def make_ltr(params: StarvationParams) -> Policy:
    return Policy("ltr", LtrOrder(params), gate=None, step_budget=None, reads_cache=False)


class LtrOrder:
    """By score, the highest (shortest) first. What has no score ranks as the mean of the requests that have ended."""

    def __init__(self, params: StarvationParams) -> None:
        self._params = params
        self._scores = RecentMean()

    def new_queue(self) -> OrderQueue:
        return guarded(KeyedQueue(lambda request: (self.rank(request),)), self._params)

    def rank(self, request: Waiting) -> float:
        if request.output_score is not None:
            return -request.output_score
        return -(self._scores.value or 0.0)

    def finished(self, request: Waiting, num_output_tokens: int, now_s: float) -> None:
        if request.output_score is not None:
            self._scores.add(request.output_score)

"""Queues by a key that a request gets once, and orders of such queues; what most policies are made of."""

from collections.abc import Callable

from weir.core.heaps import LazyHeap
from weir.policy.seams import OrderQueue, Waiting
from weir.policy.starvation import StarvationParams, guarded

Key = tuple[float, ...]
KeyOf = Callable[[Waiting], Key]


class KeyedQueue:
    """Smallest key first, ties by arrival, then by id. O(log n) for whatever is done with one request.

    A key may age at no cost: subtracting `rate * waited` from all keys keeps their order if `rate * arrived_at_s` is
    added to each of them once.
    """

    def __init__(self, key_of: KeyOf) -> None:
        self._key_of = key_of
        self._heap: LazyHeap[Key] = LazyHeap()
        self._requests: dict[str, Waiting] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def ids(self) -> list[str]:
        return list(self._requests)

    def try_get(self, request_id: str) -> Waiting | None:
        return self._requests.get(request_id)

    def add(self, request: Waiting) -> None:
        self._heap.push(request.request_id, (*self._key_of(request), request.arrived_at_s))
        self._requests[request.request_id] = request

    def discard(self, request_id: str) -> None:
        self._heap.discard(request_id)
        self._requests.pop(request_id, None)

    def try_peek(self, now_s: float) -> str | None:
        del now_s
        top = self._heap.try_peek()
        return None if top is None else top[1]

    def try_peek_request(self) -> Waiting | None:
        """As `try_peek`, but the request and not its id."""
        top = self._heap.try_peek()
        return None if top is None else self._requests[top[1]]

    def take(self, request_id: str, now_s: float) -> None:
        del now_s
        self.discard(request_id)


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

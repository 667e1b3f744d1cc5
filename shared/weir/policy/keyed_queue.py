"""A queue by a key that a request gets once; what most policies are made of."""

from collections.abc import Callable

from weir.core.heaps import LazyHeap
from weir.policy.seams import Waiting

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
        """Who is next, itself."""
        top = self._heap.try_peek()
        return None if top is None else self._requests[top[1]]

    def take(self, request_id: str, now_s: float) -> None:
        del now_s
        self.discard(request_id)

"""The queues: strict priority between lanes, first come first served inside one."""

from collections import Counter
from collections.abc import Iterator, Sequence

from weir.scheduling.heaps import LazyHeap
from weir.scheduling.limits import LaneLimits
from weir.scheduling.request import Rank, Request


class Lanes:
    """Requests that wait. A model has queues of its own, so that one whose workers are full holds up no other."""

    def __init__(self, lanes: Sequence[LaneLimits]) -> None:
        self._limits = {lane.name: lane for lane in lanes}
        self._queues: dict[str, dict[str, LazyHeap[Rank]]] = {}
        """model -> lane -> queue, lanes from the most urgent on; a model without requests has no entry."""
        self._requests: dict[str, Request] = {}
        self._counts: Counter[str] = Counter()
        self._expiry: LazyHeap[tuple[float]] = LazyHeap()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def num_queued(self, lane: str) -> int:
        return self._counts[lane]

    def num_ahead(self, lane: str) -> int:
        """How many a new request of the lane would wait for."""
        total = 0
        for name in self._limits:
            total += self._counts[name]
            if name == lane:
                break
        return total

    def is_full(self, lane: str) -> bool:
        return self._counts[lane] >= self._limits[lane].max_queued

    def models(self) -> list[str]:
        return list(self._queues)

    def requests_of(self, model: str) -> list[Request]:
        """In no order."""
        queues = self._queues.get(model, {})
        return [self._requests[request_id] for queue in queues.values() for request_id in queue.ids()]

    def add(self, request: Request) -> None:
        model = request.submit.model
        if model not in self._queues:
            self._queues[model] = {name: LazyHeap() for name in self._limits}
        self._queues[model][request.lane].push(request.request_id, request.rank)
        self._expiry.push(request.request_id, (request.expires_at_s,))
        self._requests[request.request_id] = request
        self._counts[request.lane] += 1

    def remove(self, request: Request) -> None:
        del self._requests[request.request_id]
        self._counts[request.lane] -= 1
        self._expiry.discard(request.request_id)
        queues = self._queues[request.submit.model]
        queues[request.lane].discard(request.request_id)
        if not any(queues.values()):
            del self._queues[request.submit.model]

    def try_next(self, model: str) -> Request | None:
        """The first of the most urgent lane that has one."""
        for queue in self._queues.get(model, {}).values():
            top = queue.try_peek()
            if top is not None:
                return self._requests[top[1]]
        return None

    def expired(self, now_s: float) -> Iterator[Request]:
        """Those whose time is over, earliest first; the caller removes each before it takes the next."""
        while (top := self._expiry.try_peek()) is not None and top[0][0] <= now_s:
            yield self._requests[top[1]]

    def check_integrity(self) -> list[str]:
        """What does not add up."""
        errors = []
        queued = [
            request_id for queues in self._queues.values() for queue in queues.values() for request_id in queue.ids()
        ]
        if sorted(queued) != sorted(self._requests):
            errors.append(f"queues hold {len(queued)} requests, their index {len(self._requests)}")
        if sorted(self._expiry.ids()) != sorted(self._requests):
            errors.append(f"the expiry heap holds {len(self._expiry)} requests, the index {len(self._requests)}")
        counted = Counter(request.lane for request in self._requests.values())
        if counted != +self._counts:
            errors.append(f"lanes count {dict(self._counts)}, there are {dict(counted)}")
        return errors

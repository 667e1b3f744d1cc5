"""Length-aware batching: requests of similar length go one after the other, so that a batch has little padding.

Buckets have bounds that double; one is served until `batch` requests were taken of it or it is empty, then the one
whose head is oldest. Bucketing by predicted output is Multi-Bin Batching (Guldogan et al., arXiv 2412.04504). It is
for static batches: with continuous batching and ragged kernels it gains nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass

from weir.policy.keyed_orders import KeyedQueue
from weir.policy.params import bounded, check_bounds
from weir.policy.seams import OrderQueue, Policy, Waiting


@dataclass(frozen=True, slots=True)
class BucketedParams:
    """`first_bound`: the longest of the first bucket, in tokens; the last bucket has no bound."""

    first_bound: int = bounded(128, 1)
    num_buckets: int = bounded(8, 1, 64)
    batch: int = bounded(32, 1)
    by_output: bool = False
    """By predicted output instead of the prompt; what has no prediction counts as its `max_tokens`."""

    def __post_init__(self) -> None:
        check_bounds(self)


def make_bucketed(params: BucketedParams) -> Policy:
    return Policy("bucketed", BucketedOrder(params), gate=None, step_budget=None)


class BucketedOrder:
    """Fixed bounds; nothing is shared between queues."""

    def __init__(self, params: BucketedParams) -> None:
        self._params = params

    def new_queue(self) -> OrderQueue:
        return _BucketedQueue(self._params.num_buckets, self._params.batch, self._bucket_of)

    def rank(self, request: Waiting) -> float:
        del request
        return 0.0

    def finished(self, request: Waiting, num_output_tokens: int, now_s: float) -> None:
        """Nothing is learned."""

    def _bucket_of(self, request: Waiting) -> int:
        length: float = request.num_uncached_tokens
        if self._params.by_output:
            predicted = request.predicted_output_tokens
            length = request.max_tokens if predicted is None else predicted
        bound, bucket = self._params.first_bound, 0
        while length > bound and bucket < self._params.num_buckets - 1:
            bound, bucket = 2 * bound, bucket + 1
        return bucket


class _BucketedQueue:
    def __init__(self, num_buckets: int, batch: int, bucket_of: Callable[[Waiting], int]) -> None:
        self._buckets = [KeyedQueue(lambda _: ()) for _ in range(num_buckets)]
        self._batch = batch
        self._bucket_of = bucket_of
        self._bucket_by_id: dict[str, int] = {}
        self._served = 0
        self._num_left = 0
        """To be taken of the bucket `_served` before another's turn."""

    def __len__(self) -> int:
        return len(self._bucket_by_id)

    def ids(self) -> list[str]:
        return list(self._bucket_by_id)

    def add(self, request: Waiting) -> None:
        if request.request_id in self._bucket_by_id:
            raise ValueError(f"{request.request_id} is in the queue already")
        bucket = self._bucket_of(request)
        self._buckets[bucket].add(request)
        self._bucket_by_id[request.request_id] = bucket

    def discard(self, request_id: str) -> None:
        bucket = self._bucket_by_id.pop(request_id, None)
        if bucket is not None:
            self._buckets[bucket].discard(request_id)

    def try_peek(self, now_s: float) -> str | None:
        if self._num_left > 0 and self._buckets[self._served]:
            return self._buckets[self._served].try_peek(now_s)
        heads = (bucket.try_first() for bucket in self._buckets)
        oldest = min((head for head in heads if head is not None), default=None)
        return None if oldest is None else oldest[1]

    def take(self, request_id: str, now_s: float) -> None:
        bucket = self._bucket_by_id.pop(request_id)
        goes_on = bucket == self._served and self._num_left > 0
        self._num_left = (self._num_left if goes_on else self._batch) - 1
        self._served = bucket
        self._buckets[bucket].take(request_id, now_s)

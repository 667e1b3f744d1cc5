"""Magnus: highest response ratio next over predicted serving times; for static batches, batches of little waste.

Cheng et al., "Enabling Efficient Batch Serving for LMaaS via Generation Length Prediction", arXiv 2406.04785. The
response ratio (waited + serving) / serving makes the long ones older by and by, so nobody starves. Serving times are
rounded to buckets; inside a bucket the oldest has the highest ratio, so a pick looks at one head a bucket.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass
from math import inf
from typing import Protocol

from weir.policy.estimators import LeastSquares, RecentMean
from weir.policy.keyed_queue import KeyedQueue
from weir.policy.params import bounded, check_bounds
from weir.policy.seams import OrderQueue, Policy, Waiting
from weir.policy.wma import WmaGate

_MAX_STARTED = 65_536
_MIN_SERVING_S = 0.001


@dataclass(frozen=True, slots=True)
class MagnusParams:
    """Serving times begin as prefill_token_ms * uncached tokens + decode_token_ms * predicted output, and are fitted to
    what requests took. `static_batches`: the worker runs batch after batch, each put together by wasted memory access:
    less than `max_waste` (tokens attended to for nothing) in each, at most `max_batch` sequences; a batch that is not
    full is held back for `max_hold_s` at most."""

    prefill_token_ms: float = bounded(0.02, 0)
    decode_token_ms: float = bounded(15.0, 0)
    resolution: float = bounded(0.2, 0.01, 10)
    """Serving times within this share of each other count as one."""
    static_batches: bool = False
    max_waste: float = bounded(50_000, 0)
    max_batch: int = bounded(64, 1)
    max_hold_s: float = bounded(0.0, 0)

    def __post_init__(self) -> None:
        check_bounds(self)


class ServingTime(Protocol):
    """Predicts how long a request will be served, and learns from how long it was."""

    def seconds(self, num_uncached_tokens: float, num_output_tokens: float) -> float: ...

    def observe(self, num_uncached_tokens: float, num_output_tokens: float, seconds: float) -> None: ...


def make(params: MagnusParams) -> Policy:
    gate = WmaGate(params.max_waste, params.max_batch, params.max_hold_s) if params.static_batches else None
    order = MagnusOrder(params, LinearServingTime(params))
    return Policy("magnus", order, gate, step_budget=None)


class LinearServingTime:
    """Linear in the tokens to prefill and to decode."""

    def __init__(self, params: MagnusParams) -> None:
        prior = (0.0, params.prefill_token_ms / 1000, params.decode_token_ms / 1000)
        self._fit = LeastSquares(prior, scales=(1.0, 1000.0, 200.0), decay=0.99)

    def seconds(self, num_uncached_tokens: float, num_output_tokens: float) -> float:
        return max(_MIN_SERVING_S, self._fit.predict((1.0, num_uncached_tokens, num_output_tokens)))

    def observe(self, num_uncached_tokens: float, num_output_tokens: float, seconds: float) -> None:
        self._fit.observe((1.0, num_uncached_tokens, num_output_tokens), seconds)


class MagnusOrder:
    """Learns from every request that ends how long answers are and how long they take."""

    def __init__(self, params: MagnusParams, serving_time: ServingTime) -> None:
        self._log_step = math.log1p(params.resolution)
        self._serving_time = serving_time
        self._lengths = RecentMean()
        self._started_at_s: OrderedDict[str, float] = OrderedDict()

    def new_queue(self) -> OrderQueue:
        return _RatioQueue(self)

    def rank(self, request: Waiting) -> float:
        """Its predicted serving time, in seconds."""
        return self._serving_time.seconds(request.num_uncached_tokens, self._output_of(request))

    def started(self, request_id: str, now_s: float) -> None:
        """Its serving time begins."""
        self._started_at_s[request_id] = now_s
        if len(self._started_at_s) > _MAX_STARTED:
            self._started_at_s.popitem(last=False)

    def finished(self, request: Waiting, num_output_tokens: int, now_s: float) -> None:
        self._lengths.add(num_output_tokens)
        started_at_s = self._started_at_s.pop(request.request_id, None)
        if started_at_s is not None:
            self._serving_time.observe(request.num_uncached_tokens, num_output_tokens, now_s - started_at_s)

    def bucket_of(self, request: Waiting) -> int:
        return round(math.log(self.rank(request)) / self._log_step)

    def serving_s(self, bucket: int) -> float:
        """That of every request of the bucket."""
        return math.exp(bucket * self._log_step)

    def _output_of(self, request: Waiting) -> float:
        if request.predicted_output_tokens is not None:
            return request.predicted_output_tokens
        mean = self._lengths.value
        return float(request.max_tokens) if mean is None else mean


class _Bucket:
    """Requests of one serving time, by arrival."""

    def __init__(self, serving_s: float) -> None:
        self.serving_s = serving_s
        self.queue = KeyedQueue(lambda _: ())
        self.first_at_s = inf
        """When the oldest came."""
        self.first_id = ""

    def add(self, request: Waiting) -> None:
        self.queue.add(request)
        self._update_first()

    def discard(self, request_id: str) -> None:
        self.queue.discard(request_id)
        self._update_first()

    def _update_first(self) -> None:
        first = self.queue.try_peek_request()
        if first is not None:
            self.first_at_s, self.first_id = first.arrived_at_s, first.request_id


class _RatioQueue:
    """One queue by arrival for each serving time."""

    def __init__(self, order: MagnusOrder) -> None:
        self._order = order
        self._buckets: dict[int, _Bucket] = {}
        self._bucket_by_id: dict[str, int] = {}
        self._peeked: tuple[float, str | None] | None = None
        """Who is next, and when: as long as nobody comes or leaves."""

    def __len__(self) -> int:
        return len(self._bucket_by_id)

    def ids(self) -> list[str]:
        return list(self._bucket_by_id)

    def add(self, request: Waiting) -> None:
        if request.request_id in self._bucket_by_id:
            raise ValueError(f"{request.request_id} is in the queue already")
        self._peeked = None
        number = self._order.bucket_of(request)
        self._bucket_by_id[request.request_id] = number
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = _Bucket(self._order.serving_s(number))
        bucket.add(request)

    def discard(self, request_id: str) -> None:
        number = self._bucket_by_id.pop(request_id, None)
        if number is not None:
            self._peeked = None
            bucket = self._buckets[number]
            bucket.discard(request_id)
            if not bucket.queue:
                del self._buckets[number]

    def try_peek(self, now_s: float) -> str | None:
        if self._peeked is None or self._peeked[0] != now_s:
            heads = [
                ((one.first_at_s - now_s) / one.serving_s, one.first_at_s, one.first_id)
                for one in self._buckets.values()
            ]
            self._peeked = now_s, min(heads)[2] if heads else None
        return self._peeked[1]

    def take(self, request_id: str, now_s: float) -> None:
        self.discard(request_id)
        self._order.started(request_id, now_s)

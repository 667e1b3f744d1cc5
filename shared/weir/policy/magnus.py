"""Magnus: highest response ratio next over predicted serving times; for static batches, batches of little waste.

Cheng et al., "Enabling Efficient Batch Serving for LMaaS via Generation Length Prediction", arXiv 2406.04785. The
response ratio (waited + serving) / serving makes the long ones older by and by, so nobody starves. Serving times are
rounded to buckets; inside a bucket the oldest has the highest ratio, so a pick looks at one head a bucket.

Of a static batch with longest prompt L and longest predicted output G, request i (prompt p, output g) wastes

    padding    g * (L - p)                          tokens of padding that its steps attend to
    waiting    sum of s + L for s = g .. G - 1      tokens attended to after it has ended

A batch's waste is the most that any of its requests wastes.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from weir.policy.estimators import LeastSquares, RecentMean
from weir.policy.keyed_orders import KeyedQueue
from weir.policy.params import bounded, check_bounds
from weir.policy.seams import BatchView, GateDecision, Member, OrderQueue, Policy, Waiting

_MAX_STARTED = 65_536
_MIN_SERVING_S = 0.001
_ROUNDING = 1e-9
"""Of a response ratio; far more than what numbers are rounded by."""


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


def make_magnus(params: MagnusParams) -> Policy:
    gate = WmaGate(params) if params.static_batches else None
    order = MagnusOrder(params, LinearServingTime(params))
    return Policy("magnus", order, gate, step_budget=None)


class LinearServingTime:
    """How long a request will be served, linear in the tokens to prefill and to decode; fitted to how long it was."""

    def __init__(self, params: MagnusParams) -> None:
        prior = (0.0, params.prefill_token_ms / 1000, params.decode_token_ms / 1000)
        self._fit = LeastSquares(prior, scales=(1.0, 1000.0, 200.0), decay=0.99)

    def seconds(self, num_uncached_tokens: float, num_output_tokens: float) -> float:
        return max(_MIN_SERVING_S, self._fit.predict((1.0, num_uncached_tokens, num_output_tokens)))

    def observe(self, num_uncached_tokens: float, num_output_tokens: float, seconds: float) -> None:
        self._fit.observe((1.0, num_uncached_tokens, num_output_tokens), seconds)


class MagnusOrder:
    """Learns from every request that ends how long answers are and how long they take."""

    def __init__(self, params: MagnusParams, serving_time: LinearServingTime) -> None:
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

    __slots__ = ("first_at_s", "first_id", "queue", "serving_s")

    def __init__(self, serving_s: float) -> None:
        self.serving_s = serving_s
        self.queue = KeyedQueue(lambda _: ())
        self.first_at_s = inf
        """When the oldest came."""
        self.first_id = ""

    def add(self, request: Waiting) -> bool:
        """Whether it is the oldest now."""
        self.queue.add(request)
        is_first = (request.arrived_at_s, request.request_id) < (self.first_at_s, self.first_id)
        if is_first:
            self.first_at_s, self.first_id = request.arrived_at_s, request.request_id
        return is_first

    def discard(self, request_id: str) -> bool:
        """Whether it was the oldest. Without requests the bucket is of no use any more."""
        self.queue.discard(request_id)
        was_first = request_id == self.first_id
        first = self.queue.try_first() if was_first else None
        if first is not None:
            self.first_at_s, self.first_id = first
        return was_first

    def is_older_than(self, other: "_Bucket") -> bool:
        """By their oldest requests; ties by id."""
        return (self.first_at_s, self.first_id) < (other.first_at_s, other.first_id)


class _Peeked(NamedTuple):
    at_s: float
    until_s: float
    request_id: str | None


class _RatioQueue:
    """One queue by arrival for each serving time."""

    def __init__(self, order: MagnusOrder) -> None:
        self._order = order
        self._buckets: dict[int, _Bucket] = {}
        self._bucket_by_id: dict[str, int] = {}
        self._peeked: _Peeked | None = None
        """Who is next, as long as each bucket's oldest stays the same."""

    def __len__(self) -> int:
        return len(self._bucket_by_id)

    def ids(self) -> list[str]:
        return list(self._bucket_by_id)

    def add(self, request: Waiting) -> None:
        if request.request_id in self._bucket_by_id:
            raise ValueError(f"{request.request_id} is in the queue already")
        number = self._order.bucket_of(request)
        self._bucket_by_id[request.request_id] = number
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = _Bucket(self._order.serving_s(number))
        if bucket.add(request):
            self._peeked = None

    def discard(self, request_id: str) -> None:
        number = self._bucket_by_id.pop(request_id, None)
        if number is not None:
            bucket = self._buckets[number]
            if bucket.discard(request_id):
                self._peeked = None
            if not bucket.queue:
                del self._buckets[number]

    def try_peek(self, now_s: float) -> str | None:
        peeked = self._peeked
        if peeked is None or (now_s != peeked.at_s and not peeked.at_s < now_s < peeked.until_s):
            peeked = self._peeked = self._peek(now_s)
        return peeked.request_id

    def take(self, request_id: str, now_s: float) -> None:
        self.discard(request_id)
        self._order.started(request_id, now_s)

    def _peek(self, now_s: float) -> _Peeked:
        """Who has waited most of its serving times; ties by arrival, then by id.

        All wait on, the quickest to serve gains most: until it could have caught up with the first, if it were the
        second now, nobody has.
        """
        best: _Bucket | None = None
        least = second = inf
        for one in self._buckets.values():
            ratio = (one.first_at_s - now_s) / one.serving_s
            if ratio < least or (ratio == least and (best is None or one.is_older_than(best))):
                best, least, second = one, ratio, least
            elif ratio < second:
                second = ratio
        if best is None:
            return _Peeked(now_s, inf, None)
        gain_per_s = 1 / self._order.serving_s(min(self._buckets)) - 1 / best.serving_s
        lead = max(0.0, second - least - _ROUNDING * (1 - least))
        if lead == 0:
            return _Peeked(now_s, now_s, best.first_id)
        return _Peeked(now_s, now_s + lead / gain_per_s if gain_per_s > 0 else inf, best.first_id)


@dataclass(frozen=True, slots=True)
class RequestLengths:
    """Lengths of one request of a batch."""

    num_prompt_tokens: int
    num_output_tokens: float


def waste(requests: Sequence[RequestLengths]) -> float:
    """Tokens that a batch, which must not be empty, wastes."""
    longest_prompt = max(request.num_prompt_tokens for request in requests)
    longest_output = max(request.num_output_tokens for request in requests)
    return max(_waste_of(request, longest_prompt, longest_output) for request in requests)


def _waste_of(request: RequestLengths, longest_prompt: int, longest_output: float) -> float:
    output = request.num_output_tokens
    padding = output * (longest_prompt - request.num_prompt_tokens)
    num_steps = longest_output - output
    waiting = num_steps * longest_prompt + num_steps * (output + longest_output - 1) / 2
    return padding + waiting


class WmaGate:
    """Nobody joins a batch that runs. Of those that wait, each opens a batch or joins the one that it makes waste the
    least; the batch of the first of them starts, for the order has put it first."""

    def __init__(self, params: MagnusParams) -> None:
        self._params = params
        self._next_deadline_s: float | None = None

    def decide(self, view: BatchView, now_s: float) -> GateDecision:
        self._next_deadline_s = None
        if view.running or not view.waiting or view.max_running <= 0:
            return GateDecision(())
        max_batch = min(self._params.max_batch, view.max_running)
        batches = self._batches(view, max_batch)
        first = batches[0]
        held_until_s = min(member.waits_since_s for member in view.waiting) + self._params.max_hold_s
        if len(view.waiting) < max_batch and now_s < held_until_s:
            self._next_deadline_s = held_until_s
            return GateDecision(())
        return GateDecision(first)

    @property
    def next_deadline_s(self) -> float | None:
        return self._next_deadline_s

    def _batches(self, view: BatchView, max_batch: int) -> list[list[int]]:
        """Indices of the waiting, batch by batch in the order in which they were opened."""
        requests = [_lengths_of(member) for member in view.waiting]
        batches: list[list[int]] = []
        for index, request in enumerate(requests):
            best: tuple[float, int] | None = None
            for number, batch in enumerate(batches):
                joined = [*(requests[i] for i in batch), request]
                if len(joined) > max_batch or _peak_tokens(joined) > view.num_pool_tokens:
                    continue
                wasted = waste(joined)
                if wasted < self._params.max_waste and (best is None or (wasted, number) < best):
                    best = wasted, number
            if best is None:
                batches.append([index])
            else:
                batches[best[1]].append(index)
        return batches


def _lengths_of(member: Member) -> RequestLengths:
    """Without a prediction: as long as its prompt."""
    predicted = member.predicted_output_tokens
    return RequestLengths(member.num_prompt_tokens, float(member.num_prompt_tokens) if predicted is None else predicted)


def _peak_tokens(requests: Sequence[RequestLengths]) -> float:
    longest = max(s.num_prompt_tokens for s in requests) + max(s.num_output_tokens for s in requests)
    return len(requests) * longest

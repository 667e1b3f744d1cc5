"""WAIT: a step starts when each type of request has its fluid share waiting, and takes no more than that.

Ao, Luo, Simchi-Levi, Wang: "Optimizing LLM Inference: Fluid-Guided Online Scheduling with Memory Constraints", arXiv
2504.11320. In the fluid limit every request of a batch moves on by one token a step. Type j arrives lambda_j times a
second with l_j tokens of prompt and l'_j of output; a step takes tau = d0 + d1 * (tokens in pages). In balance each
stage of type j holds lambda_j * tau requests, so that pages hold tau * W tokens, W = sum over types of lambda_j * sum
over k = 0 .. l'_j of (l_j + k). Hence tau* = d0 / (1 - d1 * W).

A type is a pair of doubling buckets, of prompt and of predicted output. In balance n_j = lambda_j * tau* of type j come
within a step, so a step that waits for n_j of each holds nobody up for long, and pages never hold more than the fluid
does. Rates are those of the last minute, so a burst is not known before it is there: when arrivals vary too much, no
step waits for a share; that none takes more than its share stays, for it depends on the mix of types, not on how fast
they come.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from weir.kv.geometry import PAGE_TOKENS
from weir.policy.keyed_orders import fcfs_order
from weir.policy.params import bounded, check_bounds
from weir.policy.seams import BatchView, GateDecision, Member, Policy
from weir.policy.traffic import Departures, SeenArrival, Traffic

Type = tuple[int, int]
_SHORTEST = 64
_REFRESH_S = 1.0


@dataclass(frozen=True, slots=True)
class Flow:
    """Requests of one type; the rate is per second, lengths are in tokens."""

    rate: float
    num_prompt_tokens: float
    num_output_tokens: float

    @property
    def num_stages(self) -> float:
        """Steps that one takes: one for its prompt, one a token."""
        return self.num_output_tokens + 1

    @property
    def work(self) -> float:
        """Token-steps that arrive a second."""
        return self.rate * self.num_stages * (self.num_prompt_tokens + self.num_output_tokens / 2)

    @property
    def held_work(self) -> float:
        """The same in whole pages: half of a sequence's last page is empty on average."""
        return self.work + self.rate * self.num_stages * PAGE_TOKENS / 2


def balanced_step_s(flows: Iterable[Flow], base_s: float, token_s: float) -> float:
    """tau*; infinite where no balance exists: each step brings more than it serves."""
    room = 1 - token_s * sum(flow.work for flow in flows)
    return base_s / room if room > 0 else math.inf


def longest_step_s(flows: Iterable[Flow], num_pool_tokens: float) -> float:
    """The tau at which the fluid just fills the pages; infinite without any flow."""
    work = sum(flow.held_work for flow in flows)
    return num_pool_tokens / work if work > 0 else math.inf


@dataclass(frozen=True, slots=True)
class WaitParams:
    """`base_ms`, `token_ms`: d0 and d1 of the model of a step. `max_wait_s`: no step is held back longer. `safety`: the
    share of the pages that the fluid leaves free. Above `max_variation` of arrivals a second no step waits."""

    base_ms: float = bounded(6.0, 0.001)
    token_ms: float = bounded(5e-5, 0)
    max_wait_s: float = bounded(0.1, 0)
    window_s: float = bounded(60.0, 1)
    safety: float = bounded(0.1, 0, 0.9)
    max_variation: float = bounded(2.0, 0)

    def __post_init__(self) -> None:
        check_bounds(self)


def make_wait(params: WaitParams) -> Policy:
    return Policy("wait", fcfs_order(), WaitGate(params), step_budget=None, reads_cache=False)


@dataclass(frozen=True, slots=True)
class Share:
    """What the fluid gives one type: `num_a_step` at the rate at which it just fills the pages, `quota` to wait for."""

    num_a_step: float
    quota: int
    max_in_batch: int


def shares(flows: dict[Type, Flow], params: WaitParams, num_pool_tokens: int) -> dict[Type, Share]:
    """A quota under one is none: the next of that type is not due within a step."""
    longest_s = longest_step_s(flows.values(), num_pool_tokens * (1 - params.safety))
    balanced_s = balanced_step_s(flows.values(), params.base_ms / 1000, params.token_ms / 1000)
    step_s = min(balanced_s, longest_s)
    return {
        kind: Share(
            num_a_step=flow.rate * longest_s,
            quota=math.floor(flow.rate * step_s),
            max_in_batch=max(1, math.floor(flow.rate * longest_s * flow.num_stages)),
        )
        for kind, flow in flows.items()
    }


class WaitGate:
    """Holds the whole batch while a type is short of its quota."""

    def __init__(self, params: WaitParams) -> None:
        self._params = params
        self._traffic = Traffic(params.window_s)
        self._departures = Departures()
        self._shares: dict[Type, Share] = {}
        """Empty: the gate stands open."""
        self._credits: dict[Type, float] = {}
        self._refresh_at_s = -math.inf
        self._held_since_s: float | None = None
        self._next_deadline_s: float | None = None

    def decide(self, view: BatchView, now_s: float) -> GateDecision:
        self._next_deadline_s = None
        self._traffic.observe(view, now_s)
        self._departures.observe(view)
        if now_s >= self._refresh_at_s:
            self._refresh(view.num_pool_tokens, now_s)
        max_joining = max(0, view.max_running - len(view.running))
        if not self._shares:
            return GateDecision(range(min(max_joining, len(view.waiting))))
        running = Counter(self._type_of(member) for member in view.running)
        if self._is_held(view, running, now_s):
            return GateDecision((), range(len(view.running)))
        return GateDecision(self._joining(view.waiting, running, max_joining))

    @property
    def next_deadline_s(self) -> float | None:
        return self._next_deadline_s

    def _is_held(self, view: BatchView, running: Counter[Type], now_s: float) -> bool:
        waiting = Counter(self._type_of(member) for member in view.waiting)
        is_short = any(
            waiting[kind] < min(share.quota, share.max_in_batch - running[kind]) for kind, share in self._shares.items()
        )
        if not is_short or not (view.waiting or view.running):
            self._held_since_s = None
            return False
        if self._held_since_s is None:
            self._held_since_s = now_s
        due_s = self._held_since_s + self._params.max_wait_s
        if now_s >= due_s:
            self._held_since_s = None
            return False
        self._next_deadline_s = due_s
        return True

    def _joining(self, waiting: Sequence[Member], running: Counter[Type], max_joining: int) -> list[int]:
        """At most a step's share of each type; what is left of it counts for the next step, up to one request."""
        for kind, share in self._shares.items():
            self._credits[kind] = min(self._credits.get(kind, 1.0), 1.0) + share.num_a_step
        joining: list[int] = []
        for index, member in enumerate(waiting):
            if len(joining) >= max_joining:
                break
            kind = self._type_of(member)
            if running and kind in self._shares:
                if self._credits[kind] < 1 or running[kind] >= self._shares[kind].max_in_batch:
                    continue
                self._credits[kind] -= 1
            running[kind] += 1
            joining.append(index)
        return joining

    def _refresh(self, num_pool_tokens: int, now_s: float) -> None:
        self._refresh_at_s = now_s + _REFRESH_S
        self._shares = shares(self._flows(now_s), self._params, num_pool_tokens)
        if self._traffic.variation > self._params.max_variation:
            self._shares = {kind: replace(share, quota=0) for kind, share in self._shares.items()}
        self._credits = {kind: credit for kind, credit in self._credits.items() if kind in self._shares}

    def _flows(self, now_s: float) -> dict[Type, Flow]:
        by_type: dict[Type, list[SeenArrival]] = {}
        for seen in self._traffic.arrivals:
            kind = self._type(seen.num_prompt_tokens, seen.predicted_output_tokens)
            by_type.setdefault(kind, []).append(seen)
        span_s = self._traffic.span_s(now_s)
        flows = {}
        for kind, arrivals in by_type.items():
            num_prompt_tokens = sum(seen.num_prompt_tokens for seen in arrivals) / len(arrivals)
            num_output_tokens = sum(self._output(seen.predicted_output_tokens) for seen in arrivals) / len(arrivals)
            flows[kind] = Flow(len(arrivals) / span_s, num_prompt_tokens, num_output_tokens)
        return flows

    def _type_of(self, member: Member) -> Type:
        return self._type(member.num_prompt_tokens, member.predicted_output_tokens)

    def _type(self, num_prompt_tokens: int, predicted: float | None) -> Type:
        return _bucket(num_prompt_tokens), -1 if predicted is None else _bucket(predicted)

    def _output(self, predicted: float | None) -> float:
        """Without a prediction: the mean of what left the batch, and before anything did, one bucket."""
        if predicted is not None:
            return predicted
        return self._departures.mean or _SHORTEST


@lru_cache(maxsize=4096)
def _bucket(num_tokens: float) -> int:
    return max(0, math.ceil(math.log2(max(1.0, num_tokens) / _SHORTEST)))

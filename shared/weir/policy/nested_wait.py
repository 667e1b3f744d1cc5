"""Nested WAIT: as WAIT, for answers whose length nobody knows beforehand.

Ao, Luo, Simchi-Levi, Wang, arXiv 2504.11320. Stages (output tokens so far) are cut into segments at quantiles of the
answers that have ended. Fewer requests reach a later segment, so its share of the pages is smaller; a sequence that
comes to the end of a segment is paused, with its pages, until the next one has room. A segment runs only if the one
before it does and enough wait to enter it.

How many outlive a segment is chance, so the paper keeps memory free beyond the fluid's, logarithmic in how seldom it
may run out, and thresholds after the first that are strictly over what arrives there on average. Here entry is even and
cohorts of different age are independent: at any moment the pages hold tau * W tokens on average, with a variance of
tau * V, and the step is chosen such that tau * W + z * sqrt(tau * V) fits, z = sqrt(2 ln 1/p) (the Gaussian bound for
p = 0.001 at one moment). A later segment takes z deviations more than the mean; when one is full all the same, the mix
has changed, and nobody enters the first until there is room. Nothing is known of who outlives the last length: the last
segment has room for all. Before lengths are known at all, requests are taken at their own bound.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from weir.policy.keyed_orders import fcfs_order
from weir.policy.seams import BatchView, GateDecision, Policy
from weir.policy.traffic import Departures, Traffic
from weir.policy.wait import Flow, WaitParams, balanced_step_s

_QUANTILES = (0.5, 0.8, 0.95)
_MIN_LENGTHS = 20
_REFRESH_S = 1.0
_DEVIATIONS = math.sqrt(2 * math.log(1 / 0.001))


def make_nested_wait(params: WaitParams) -> Policy:
    return Policy("nested-wait", fcfs_order(), NestedWaitGate(params), step_budget=None, reads_cache=False)


@dataclass(frozen=True, slots=True)
class LengthSegment:
    """Tokens (begins, ends] of an answer. `quota`: entrants to wait for; `max_inside`: sequences within it."""

    ends: float
    quota: int
    max_inside: float


@dataclass(frozen=True, slots=True)
class LengthSegments:
    """From the first on; the last ends nowhere. `num_a_step`: how many may enter the first one each step."""

    segments: tuple[LengthSegment, ...]
    num_a_step: float


def segments(
    rate: float,
    num_prompt_tokens: float,
    lengths: Sequence[int],
    params: WaitParams,
    num_pool_tokens: int,
    prompt_variance: float = 0.0,
) -> LengthSegments:
    """Of answers like `lengths`, that come `rate` times a second."""
    ordered = sorted(lengths)
    bounds = sorted({ordered[min(len(ordered) - 1, math.ceil(q * len(ordered)) - 1)] for q in _QUANTILES})
    flows = [Flow(rate / len(ordered), num_prompt_tokens, length) for length in ordered]
    variance = rate * token_variance(num_prompt_tokens, prompt_variance, ordered)
    longest_s = _longest_step_s(sum(flow.work for flow in flows), variance, num_pool_tokens * (1 - params.safety))
    step_s = min(longest_s, balanced_step_s(flows, params.base_ms / 1000, params.token_ms / 1000))
    cut = []
    for begins, ends in zip([0, *bounds], [*bounds, math.inf], strict=True):
        survivors = [length for length in ordered if length > begins]
        reaching = rate * len(survivors) / len(ordered)
        num_inside = reaching * longest_s * max(1.0, min(ends, ordered[-1]) - begins)
        max_inside = math.inf
        if begins == 0:
            max_inside = max(1, math.floor(num_inside))
        elif ends < math.inf:
            max_inside = math.ceil(num_inside + _DEVIATIONS * math.sqrt(num_inside))
        cut.append(LengthSegment(ends, math.floor(reaching * step_s), max_inside))
    return LengthSegments(tuple(cut), rate * longest_s)


def token_variance(num_prompt_tokens: float, prompt_variance: float, ordered: Sequence[int]) -> float:
    """Of the tokens in pages, if one request enters each step: the sum over ages of p (1 - p) (l + k)^2 and of p times
    the prompts' variance, p the share of the lengths (ascending) that come to age k."""
    total, begins = 0.0, 0
    for number, ends in enumerate(ordered):
        share = 1 - number / len(ordered)
        squares = ((num_prompt_tokens + ends) ** 3 - (num_prompt_tokens + begins) ** 3) / 3
        total += share * (1 - share) * squares + share * prompt_variance * (ends - begins)
        begins = ends
    return total


def _longest_step_s(work: float, variance: float, num_tokens: float) -> float:
    """The tau for which tau * work and its deviations come to `num_tokens`."""
    if work <= 0:
        return math.inf
    spread = _DEVIATIONS * math.sqrt(variance)
    return ((math.sqrt(spread**2 + 4 * work * num_tokens) - spread) / (2 * work)) ** 2


@dataclass(slots=True)
class _Inside:
    """Indices into the batch (into the waiting, of the first segment's entrants)."""

    members: list[int] = field(default_factory=list)
    entrants: list[int] = field(default_factory=list)


class NestedWaitGate:
    """Open until enough answers have ended to know their lengths; waits for nobody while arrivals vary too much."""

    def __init__(self, params: WaitParams) -> None:
        self._params = params
        self._traffic = Traffic(params.window_s)
        self._departures = Departures()
        self._plan: LengthSegments | None = None
        self._credit = 1.0
        self._refresh_at_s = -math.inf
        self._held_since_s: dict[int, float] = {}
        self._idle_since_s: float | None = None
        self._next_deadline_s: float | None = None

    def decide(self, view: BatchView, now_s: float) -> GateDecision:
        self._next_deadline_s = None
        self._traffic.observe(view, now_s)
        self._departures.observe(view)
        if now_s >= self._refresh_at_s:
            self._refresh(view.num_pool_tokens, now_s)
        max_joining = max(0, view.max_running - len(view.running))
        if self._plan is None:
            return GateDecision(range(_num_bounded(view, max_joining)))
        decision = self._run_segments(view, self._plan, max_joining, now_s)
        return self._end_of_idleness(view, max_joining, now_s) if _is_idle(view, decision) else self._go_on(decision)

    @property
    def next_deadline_s(self) -> float | None:
        return self._next_deadline_s

    def _run_segments(self, view: BatchView, plan: LengthSegments, max_joining: int, now_s: float) -> GateDecision:
        # What a step leaves of its share counts for the next one, up to one request.
        self._credit = min(self._credit, 1.0) + plan.num_a_step
        inside = _sort_in(view, plan)
        joining: Sequence[int] = ()
        paused: set[int] = set()
        is_running = bool(view.waiting or view.running)
        for number, segment in enumerate(plan.segments):
            part = inside[number]
            num_room = int(max(0, min(segment.max_inside - len(part.members), len(part.entrants))))
            is_short = len(part.entrants) < min(segment.quota, segment.max_inside - len(part.members))
            is_running = is_running and not self._is_held(number, is_short, now_s)
            if number == 0 and is_running:
                num_joining = min(num_room, max_joining, math.floor(self._credit))
                joining = part.entrants[: num_joining if view.running else max(min(1, max_joining), num_joining)]
                self._credit = max(0.0, self._credit - len(joining))
            elif number > 0:
                paused.update(part.entrants[num_room:] if is_running else part.entrants)
            if not is_running:
                paused.update(part.members)
            if number > 0 and is_running and num_room < len(part.entrants):
                self._credit += len(joining)
                joining = ()  # the mix has changed: what is paused there has pages that newcomers would want
        return GateDecision(joining, paused)

    def _go_on(self, decision: GateDecision) -> GateDecision:
        self._idle_since_s = None
        return decision

    def _end_of_idleness(self, view: BatchView, max_joining: int, now_s: float) -> GateDecision:
        """Segments may be held one after the other; together they hold the batch for `max_wait_s` at the most."""
        if self._idle_since_s is None:
            self._idle_since_s = now_s
        due_s = self._idle_since_s + self._params.max_wait_s
        if now_s < due_s:
            self._next_deadline_s = due_s
            return GateDecision((), range(len(view.running)))
        self._next_deadline_s = None
        return self._go_on(GateDecision(range(min(1, max_joining, len(view.waiting)))))

    def _is_held(self, number: int, is_short: bool, now_s: float) -> bool:
        """Whether a segment waits for entrants, for `max_wait_s` at the most."""
        if not is_short:
            self._held_since_s.pop(number, None)
            return False
        due_s = self._held_since_s.setdefault(number, now_s) + self._params.max_wait_s
        if now_s >= due_s:
            del self._held_since_s[number]
            return False
        return True

    def _refresh(self, num_pool_tokens: int, now_s: float) -> None:
        self._refresh_at_s = now_s + _REFRESH_S
        self._plan = None
        arrivals, lengths = self._traffic.arrivals, self._departures.lengths
        if not arrivals or len(lengths) < _MIN_LENGTHS:
            return
        rate = len(arrivals) / self._traffic.span_s(now_s)
        num_prompt_tokens = sum(seen.num_prompt_tokens for seen in arrivals) / len(arrivals)
        variance = sum((seen.num_prompt_tokens - num_prompt_tokens) ** 2 for seen in arrivals) / len(arrivals)
        self._plan = segments(rate, num_prompt_tokens, lengths, self._params, num_pool_tokens, variance)
        if self._traffic.variation > self._params.max_variation:
            parts = tuple(replace(segment, quota=0) for segment in self._plan.segments)
            self._plan = replace(self._plan, segments=parts)


def _num_bounded(view: BatchView, max_joining: int) -> int:
    """Of those that wait, from the first on: as many as fit beside the batch if all come to their own bounds; one where
    nothing runs."""
    num_left = view.num_pool_tokens - sum(one.num_prompt_tokens + one.max_output_tokens for one in view.running)
    num_joining = 0
    for member in view.waiting[:max_joining]:
        num_left -= member.num_prompt_tokens + member.max_output_tokens
        if num_left < 0 and (view.running or num_joining):
            break
        num_joining += 1
    return num_joining


def _is_idle(view: BatchView, decision: GateDecision) -> bool:
    """Whether nothing of what is there would be computed."""
    return bool(view.waiting or view.running) and not decision.joining and len(decision.paused) == len(view.running)


def _sort_in(view: BatchView, plan: LengthSegments) -> list[_Inside]:
    """A sequence with all tokens of a segment stands before the next one."""
    bounds = [segment.ends for segment in plan.segments[:-1]]
    inside = [_Inside() for _ in plan.segments]
    inside[0].entrants.extend(range(len(view.waiting)))
    for index, member in enumerate(view.running):
        number = bisect_left(bounds, member.num_output_tokens)
        if number < len(bounds) and member.num_output_tokens == bounds[number]:
            inside[number + 1].entrants.append(index)
        else:
            inside[number].members.append(index)
    return inside

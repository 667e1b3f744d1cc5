"""What it costs to place a request on a worker.

cost = time until the worker has prefilled what it was given before, or what it lacks of the prefix has come from
       another host, whichever is later
     + time to prefill the rest + hand-off + itl_weight * time between two tokens on the decode worker
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

from weir.bus.messages import Submit
from weir.scheduling.limits import PlacingLimits
from weir.scheduling.pools import PrefillCandidate, WorkerState
from weir.scheduling.routing.sources import Fetch


class Crossing(NamedTuple):
    """The prompt is computed at the candidate's host for a decode worker of another one."""

    source: str
    """HOST:PORT of the `Pages` of the candidate's arena."""
    num_pages: int
    """Full ones of the prompt: the decode worker computes what is behind them."""


class Option(NamedTuple):
    """One candidate for one request, with what is expected there; the least `cost_ms` is the best."""

    cost_ms: float
    candidate: PrefillCandidate
    decode_workers: Sequence[WorkerState]
    """Those that have a slot for it, the best first; never none."""
    num_cached_tokens: int
    is_full: bool
    """It has as many prompts as it may have, and is an option only for what it has cached."""
    queue_ms: float
    prefill_ms: float
    hand_off_ms: float
    fetch: Fetch | None = None
    """Of cached tokens, those that come from another host."""
    crossing: Crossing | None = None

    @property
    def ttft_ms(self) -> float:
        return self.queue_ms + self.prefill_ms + self.hand_off_ms

    @property
    def prefix_source(self) -> str:
        taken = self.crossing or self.fetch
        return "" if taken is None else taken.source

    def kind(self, split: "Option | None") -> str:
        """Why it was chosen, as the metric's label. `split`: the best one on a prefill worker."""
        if self.crossing is not None:
            return "crossing"
        if not self.candidate.is_local:
            return "split_cached" if self.num_cached_tokens else "split"
        if split is None:
            return "local"
        if split.queue_ms > self.ttft_ms:
            return "local_queue"
        return "local_hand_off" if split.hand_off_ms > split.prefill_ms else "local_short"


class Router:
    """By the rule that the limits name."""

    def __init__(self, limits: PlacingLimits) -> None:
        self._limits = limits
        self._random = random.Random(limits.seed)
        self._is_estimating = limits.router == "estimated-ttft"

    def option(
        self,
        candidate: PrefillCandidate,
        decode_workers: Sequence[WorkerState],
        submit: Submit,
        num_cached_tokens: int,
        fetch: Fetch | None = None,
        *,
        is_full: bool,
        has_both_kinds: bool,
        now_s: float,
    ) -> Option:
        """`has_both_kinds`: prefill workers and decode workers could prefill it. `fetch`: how more of the prefix could
        come here; it does where that is sooner than computing it. Where a prompt before this one is to bring as much,
        this one names the source too, for it may be the first to begin."""
        worker, limits = candidate.worker, self._limits
        num_prompt_tokens = submit.num_prompt_tokens
        queue_ms = worker.prefill.queue_ms(now_s) if worker.prefill.prompts else 0.0
        prefill = worker.prefill_beside_ms if candidate.is_local else worker.prefill_ms
        prefill_ms = prefill(num_prompt_tokens - num_cached_tokens, num_cached_tokens)
        if fetch is not None:
            is_expected = num_cached_tokens >= fetch.num_tokens
            num_here = fetch.num_tokens - fetch.num_missing_tokens
            left_ms = prefill(num_prompt_tokens - fetch.num_tokens, fetch.num_tokens)
            computed_ms = prefill(num_prompt_tokens - num_here, num_here) if is_expected else prefill_ms
            if max(0.0, fetch.fetch_ms - queue_ms) >= (1 - limits.fetch_gain) * (computed_ms - left_ms):
                fetch = None
            elif not is_expected:
                num_cached_tokens, prefill_ms = fetch.num_tokens, left_ms
                queue_ms = max(queue_ms, fetch.fetch_ms)
        if candidate.is_local:
            hand_off_ms = 0.0
            ttft_ms = queue_ms + (prefill_ms + limits.local_harm * prefill_ms * len(worker.decode.priorities))
            if has_both_kinds:
                ttft_ms /= 1 - limits.local_gain
        else:
            hand_off_ms = limits.hand_off_time_ms(num_prompt_tokens)
            ttft_ms = queue_ms + (prefill_ms + hand_off_ms)
        itl_cost_ms = limits.itl_weight * decode_workers[0].itl_ms(num_prompt_tokens)
        if self._is_estimating:
            cost_ms = ttft_ms + limits.prefill_weight * prefill_ms + itl_cost_ms
        else:
            cost_ms = self._baseline_cost(num_cached_tokens, queue_ms, itl_cost_ms)
        return Option(
            cost_ms,
            candidate,
            decode_workers,
            num_cached_tokens,
            is_full,
            queue_ms,
            prefill_ms,
            hand_off_ms,
            fetch,
        )

    def _baseline_cost(self, num_cached_tokens: int, queue_ms: float, itl_cost_ms: float) -> float:
        match self._limits.router:
            case "longest-prefix":
                return -num_cached_tokens
            case "random":
                return self._random.random()
            case _:
                return queue_ms + itl_cost_ms

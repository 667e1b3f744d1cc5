"""What it costs to place a request on a worker, by four rules: one that is meant, and three to measure it against."""

import random
from collections.abc import Sequence
from typing import NamedTuple

from weir.bus.messages import Submit
from weir.scheduling.limits.placing_limits import PlacingLimits
from weir.scheduling.workers.pools import PrefillCandidate
from weir.scheduling.workers.worker_state import WorkerState


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

    @property
    def ttft_ms(self) -> float:
        return self.queue_ms + self.prefill_ms + self.hand_off_ms

    def kind(self, split: "Option | None") -> str:
        """One word for why it was chosen: the metric's label. `split`: the best one on a prefill worker."""
        if not self.candidate.is_local:
            return "split_cached" if self.num_cached_tokens else "split"
        if split is None:
            return "local"
        if split.queue_ms > self.ttft_ms:
            return "local_queue"
        return "local_hand_off" if split.hand_off_ms > split.prefill_ms else "local_short"


class Router:
    """Costs, by the rule that the limits name."""

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
        *,
        is_full: bool,
        has_both_kinds: bool,
        now_s: float,
    ) -> Option:
        """`has_both_kinds`: prefill workers and decode workers could prefill it."""
        worker, limits = candidate.worker, self._limits
        num_uncached = submit.num_prompt_tokens - num_cached_tokens
        queue_ms = worker.prefill.queue_ms(now_s) if worker.prefill.prompts else 0.0
        if candidate.is_local:
            prefill_ms, hand_off_ms = worker.prefill_beside_ms(num_uncached, num_cached_tokens), 0.0
            ttft_ms = queue_ms + (prefill_ms + limits.local_harm * prefill_ms * len(worker.decode.priorities))
            if has_both_kinds:
                ttft_ms /= 1 - limits.local_gain
        else:
            prefill_ms = worker.prefill_ms(num_uncached, num_cached_tokens)
            hand_off_ms = limits.hand_off_time_ms(submit.num_prompt_tokens)
            ttft_ms = queue_ms + (prefill_ms + hand_off_ms)
        itl_cost_ms = limits.itl_weight * decode_workers[0].itl_ms(submit.num_prompt_tokens)
        if self._is_estimating:
            cost_ms = ttft_ms + limits.prefill_weight * prefill_ms + itl_cost_ms
        else:
            cost_ms = self._baseline_cost(num_cached_tokens, queue_ms, itl_cost_ms)
        return Option(cost_ms, candidate, decode_workers, num_cached_tokens, is_full, queue_ms, prefill_ms, hand_off_ms)

    def _baseline_cost(self, num_cached_tokens: int, queue_ms: float, itl_cost_ms: float) -> float:
        match self._limits.router:
            case "longest-prefix":
                return -num_cached_tokens
            case "random":
                return self._random.random()
            case _:
                return queue_ms + itl_cost_ms

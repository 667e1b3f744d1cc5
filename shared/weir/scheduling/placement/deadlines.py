"""When a new request would have its first token and its end, and whether that is before its client's patience ends."""

from dataclasses import dataclass

from weir.bus.messages import Submit
from weir.kv.geometry import num_pages_for
from weir.scheduling.limits.core_limits import CoreLimits
from weir.scheduling.workers.pools import WorkerPools
from weir.scheduling.workers.prefix_view import PrefixView, hashes_from

_DOUBT = 1.25
"""An estimate is held against a request only where it is over the bound by this factor."""


@dataclass(frozen=True, slots=True)
class CompletionEstimate:
    """From the grant on, in an order of its own: the best that any worker offers, as far as workers know their cost."""

    first_token_ms: float
    alone_ms: float
    """The same on a worker that has nothing else to do."""
    end_ms: float


@dataclass(frozen=True, slots=True)
class Late:
    """It cannot keep what it was asked to."""

    message: str
    retry_after_ms: int
    """0: nor could it later."""


class DeadlineEstimator:
    """Knows no more than the costs that workers have measured of their own steps; without them it is silent."""

    def __init__(self, limits: CoreLimits, pools: WorkerPools, prefixes: PrefixView) -> None:
        self._limits = limits
        self._pools = pools
        self._prefixes = prefixes

    def try_foresee(self, submit: Submit, lane: str, now_s: float) -> CompletionEstimate | None:
        """None: not every worker has told its cost, so that one may be quicker than is known."""
        pool = self._pools.pool(submit.model, self._limits.lanes_by_name[lane].worker_group)
        hashes, placing = hashes_from(submit.page_hashes), self._limits.placing
        best: CompletionEstimate | None = None
        for candidate in pool:
            worker = candidate.worker
            if not worker.is_measured or not all(one.worker.is_measured for one in candidate.decode):
                return None
            num_cached = min(self._prefixes.num_cached_tokens(worker.arena_id, hashes), submit.num_prompt_tokens - 1)
            prefill_ms = worker.prefill_ms(submit.num_prompt_tokens - num_cached, num_cached)
            hand_off_ms = placing.hand_off_ms + placing.hand_off_page_ms * num_pages_for(submit.num_prompt_tokens)
            alone_ms = prefill_ms + (0.0 if candidate.is_local else hand_off_ms)
            first_ms = worker.prefill.queue_ms(now_s) + alone_ms
            if best is None or first_ms < best.first_token_ms:
                itl_ms = min(one.worker.itl_ms(submit.num_prompt_tokens) for one in candidate.decode)
                best = CompletionEstimate(first_ms, alone_ms, first_ms + itl_ms * (_expected_tokens(submit) - 1))
        return best

    def try_late(self, submit: Submit, lane: str, wait_ms: float, now_s: float) -> Late | None:
        """`wait_ms`: for those before it in the queue. None: it may be in time. Asked only of requests with a deadline:
        others wait as long as their lane allows."""
        estimated = self.try_foresee(submit, lane, now_s) if submit.deadline_ms else None
        if estimated is None:
            return None
        bounds = [("its deadline", submit.deadline_ms, estimated.end_ms)]
        if submit.ttft_target_ms:
            bounds.append(("its target for the first token", submit.ttft_target_ms, estimated.first_token_ms))
        for name, bound_ms, needed_ms in bounds:
            if wait_ms + needed_ms <= bound_ms * _DOUBT:
                continue
            could_ever = needed_ms - estimated.first_token_ms + estimated.alone_ms <= bound_ms
            message = f"it would take about {wait_ms + needed_ms:.0f} ms, {name} is in {bound_ms} ms"
            return Late(message, max(100, int(wait_ms + needed_ms - bound_ms)) if could_ever else 0)
        return None


def _expected_tokens(submit: Submit) -> float:
    """Not the most that it may ask for: most requests end before. One, where nobody has said anything."""
    said = submit.predicted_output_tokens or submit.expected_output_tokens
    return max(1.0, min(said or 1.0, submit.max_tokens))

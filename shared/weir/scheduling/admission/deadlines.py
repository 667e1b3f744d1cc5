"""When a new request would have its first token and its end, and whether that is before its client's patience ends."""

from typing import NamedTuple

from weir.bus.messages import RefusalReason, Submit
from weir.scheduling.commands import Refusal
from weir.scheduling.limits.core_limits import CoreLimits
from weir.scheduling.workers.pools import WorkerPools
from weir.scheduling.workers.prefix_view import PrefixView, hashes_from

_DOUBT = 1.25
"""An estimate is held against a request only where it is over the bound by this factor."""


class _Completion(NamedTuple):
    """From the grant on, on the best worker."""

    first_token_ms: float
    alone_ms: float
    """The first token on a worker that has nothing else to do."""
    end_ms: float


class DeadlineEstimator:
    """Knows no more than the costs that workers have measured of their own steps; without them it refuses nobody."""

    def __init__(self, limits: CoreLimits, pools: WorkerPools, prefixes: PrefixView) -> None:
        self._limits = limits
        self._pools = pools
        self._prefixes = prefixes

    def try_refuse(self, submit: Submit, lane: str, wait_ms: float, now_s: float) -> Refusal | None:
        """`wait_ms`: for those before it in the queue. None: it may be in time, or has no deadline: then it waits as
        long as its lane allows."""
        estimated = self._try_estimate(submit, lane, now_s) if submit.deadline_ms else None
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
            retry_after_ms = max(100, int(wait_ms + needed_ms - bound_ms)) if could_ever else 0
            return Refusal(RefusalReason.DEADLINE, message, retry_after_ms)
        return None

    def _try_estimate(self, submit: Submit, lane: str, now_s: float) -> _Completion | None:
        """None: not every worker has measured its cost, so that one may be quicker than is known."""
        pool = self._pools.pool(submit.model, self._limits.lanes_by_name[lane].worker_group)
        hashes = hashes_from(submit.page_hashes)
        best: _Completion | None = None
        for candidate in pool.candidates:
            worker = candidate.worker
            if not worker.is_measured or not all(one.is_measured for one in candidate.decode_workers):
                return None
            num_cached = self._prefixes.num_cached_tokens(worker.arena.arena_id, hashes)
            num_cached = min(num_cached, submit.num_prompt_tokens - 1)
            alone_ms = worker.prefill_ms(submit.num_prompt_tokens - num_cached, num_cached)
            if not candidate.is_local:
                alone_ms += self._limits.placing.hand_off_time_ms(submit.num_prompt_tokens)
            first_ms = worker.prefill.queue_ms(now_s) + alone_ms
            if best is None or first_ms < best.first_token_ms:
                itl_ms = min(one.itl_ms(submit.num_prompt_tokens) for one in candidate.decode_workers)
                best = _Completion(first_ms, alone_ms, first_ms + itl_ms * (_expected_tokens(submit) - 1))
        return best


def _expected_tokens(submit: Submit) -> float:
    """Not the most that it may ask for: most requests end before. One, where nobody has said anything."""
    said = submit.predicted_output_tokens or submit.expected_output_tokens
    return max(1.0, min(said or 1.0, submit.max_tokens))

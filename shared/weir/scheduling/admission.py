"""Whether a new request may wait at all."""

from weir.bus.messages import RefusalReason, Submit
from weir.scheduling.lanes import Lanes
from weir.scheduling.limits import CoreLimits
from weir.scheduling.rate import FinishRate
from weir.scheduling.request import num_booked_pages
from weir.scheduling.workers import Workers

WORKER_RETRY_MS = 2000
"""A worker that died is back, or another has shown itself, after about this long."""


class Admission:
    """Refuses at once what can never start, or would wait where there is no room to wait."""

    def __init__(self, limits: CoreLimits, lanes: Lanes, workers: Workers, rate: FinishRate) -> None:
        self._limits = limits
        self._lanes = lanes
        self._workers = workers
        self._rate = rate

    def try_refuse(self, submit: Submit, *, is_gathering: bool, now_s: float) -> tuple[RefusalReason, str, int] | None:
        """Reason, sentence and milliseconds until a retry makes sense (0: never); None: it may wait."""
        name = submit.lane or self._limits.default_lane
        lane = self._limits.lanes_by_name.get(name)
        if lane is None:
            known = ", ".join(self._limits.lanes_by_name)
            return RefusalReason.UNKNOWN_LANE, f"lane {name!r} is none of {known}", 0
        if not is_gathering:
            refusal = self._try_refuse_for_workers(submit)
            if refusal is not None:
                return refusal
        if self._lanes.is_full(name):
            message = f"lane {name} is full: {lane.max_queued} requests wait"
            return RefusalReason.QUEUE_FULL, message, self._rate.retry_after_ms(self._lanes.num_ahead(name), now_s)
        return None

    def _try_refuse_for_workers(self, submit: Submit) -> tuple[RefusalReason, str, int] | None:
        model = submit.model
        if not self._workers.knows_model(model):
            return RefusalReason.UNKNOWN_MODEL, f"no worker ever served model {model!r}", 0
        hosts = self._workers.hosts_of(model)
        if not hosts:
            message = f"no host has both a prefill and a decode worker for model {model!r} now"
            return RefusalReason.NO_WORKER, message, WORKER_RETRY_MS
        num_tokens, num_pages = submit.num_prompt_tokens + submit.max_tokens, num_booked_pages(submit)
        if not any(host.can_ever_hold(num_tokens, num_pages) for host in hosts):
            message = (
                f"prompt {submit.num_prompt_tokens} + max_tokens {submit.max_tokens} = {num_tokens} tokens "
                f"({num_pages} pages): the largest host holds {max(host.num_arena_pages for host in hosts)} pages "
                f"and {max(host.max_context_tokens for host in hosts)} tokens of context; ask for fewer"
            )
            return RefusalReason.TOO_LARGE, message, 0
        return None

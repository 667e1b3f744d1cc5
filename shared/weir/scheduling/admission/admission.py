"""Whether a new request may wait at all."""

from weir.bus.messages import RefusalReason, Submit
from weir.scheduling.admission.deadlines import DeadlineEstimator
from weir.scheduling.commands import WORKER_RETRY_MS, Refusal
from weir.scheduling.limits.core_limits import CoreLimits
from weir.scheduling.queues.rate import Rates
from weir.scheduling.request import num_reserved_pages
from weir.scheduling.request_table import RequestTable
from weir.scheduling.workers.pools import WorkerPools
from weir.scheduling.workers.workers import Workers


class Admission:
    """Refuses at once what can never start, or would wait where there is no room to wait."""

    def __init__(
        self,
        limits: CoreLimits,
        requests: RequestTable,
        workers: Workers,
        pools: WorkerPools,
        rates: Rates,
        deadlines: DeadlineEstimator,
    ) -> None:
        self._limits = limits
        self._requests = requests
        self._workers = workers
        self._pools = pools
        self._rates = rates
        self._deadlines = deadlines

    def try_refuse(self, submit: Submit, *, is_gathering: bool, now_s: float) -> Refusal | None:
        """None: it may wait."""
        name = submit.lane or self._limits.default_lane
        lane, tenant = self._limits.lanes_by_name.get(name), self._limits.tenant(submit.tenant)
        if lane is None:
            known = ", ".join(self._limits.lanes_by_name)
            return Refusal(RefusalReason.UNKNOWN_LANE, f"lane {name!r} is none of {known}")
        if tenant.lanes and name not in tenant.lanes:
            message = f"lane {name!r}: tenant {tenant.name} may use {', '.join(tenant.lanes)}"
            return Refusal(RefusalReason.LANE_FORBIDDEN, message)
        refusal = None if is_gathering else self._try_refuse_for_workers(submit, lane.worker_group)
        refusal = refusal or self._try_refuse_for_room(submit, name, tenant.name, now_s)
        if refusal is not None or is_gathering or not submit.deadline_ms:
            return refusal
        return self._try_refuse_for_time(submit, name, tenant.name, now_s)

    def _try_refuse_for_workers(self, submit: Submit, group: str) -> Refusal | None:
        model = submit.model
        if not self._workers.knows_model(model):
            return Refusal(RefusalReason.UNKNOWN_MODEL, f"no worker ever served model {model!r}")
        pool = self._pools.pool(model, group)
        if not pool.host_sizes:
            message = f"no host has workers that can prefill and decode for model {model!r} now"
            return Refusal(RefusalReason.NO_WORKER, message, WORKER_RETRY_MS)
        num_tokens, num_pages = submit.num_prompt_tokens + submit.max_tokens, num_reserved_pages(submit)
        if not pool.can_ever_hold(num_tokens, num_pages):
            most_pages, most_tokens = (max(sizes) for sizes in zip(*pool.host_sizes, strict=True))
            message = (
                f"prompt {submit.num_prompt_tokens} + max_tokens {submit.max_tokens} = {num_tokens} tokens "
                f"({num_pages} pages): the largest host holds {most_pages} pages "
                f"and {most_tokens} tokens of context; ask for fewer"
            )
            return Refusal(RefusalReason.TOO_LARGE, message)
        return None

    def _try_refuse_for_time(self, submit: Submit, name: str, tenant: str, now_s: float) -> Refusal | None:
        num_ahead = self._requests.lanes.num_ahead(submit.model, name, tenant)
        wait_ms = 1000 * self._rates.wait_s(submit.model, num_ahead, now_s)
        return self._deadlines.try_refuse(submit, name, wait_ms, now_s)

    def _try_refuse_for_room(self, submit: Submit, name: str, tenant: str, now_s: float) -> Refusal | None:
        lanes, model = self._requests.lanes, submit.model
        if lanes.is_full(name):
            message = f"lane {name} is full: {self._limits.lanes_by_name[name].max_queued} requests wait"
            retry_after_ms = self._rates.retry_after_ms(model, lanes.num_ahead(model, name), now_s)
            return Refusal(RefusalReason.QUEUE_FULL, message, retry_after_ms)
        over = self._requests.tenants.try_over_quota(tenant, submit, now_s)
        if over is None:
            return None
        if over.wait_s is None:
            # One of its own leaves about when as many have left as there are tenants that take turns.
            retry_after_ms = self._rates.retry_after_ms(model, lanes.num_tenants(model, name), now_s)
        else:
            retry_after_ms = int(over.wait_s * 1000) + 1
        return Refusal(RefusalReason.QUOTA, over.message, retry_after_ms)

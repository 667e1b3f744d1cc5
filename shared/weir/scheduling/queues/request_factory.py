"""Makes the scheduler's record of a request from its Submit: its lane, its tenant, its targets, its place in time."""

from math import inf

from weir.bus.messages import Submit
from weir.core.scheduling import SchedulingParams
from weir.policy.seams import Policy, Waiting
from weir.scheduling.limits.core_limits import CoreLimits
from weir.scheduling.request import ScheduledRequest

_AHEAD_S = 1.0
_MAX_AHEAD = 999_999


class RequestFactory:
    """Under one set of limits and one policy."""

    def __init__(self, limits: CoreLimits, policy: Policy, started_at_s: float) -> None:
        self._limits = limits
        self._policy = policy
        self._started_at_s = started_at_s

    def lane_of(self, submit: Submit) -> str:
        return submit.lane or self._limits.default_lane

    def arrival_s(self, now_s: float, num_ahead: int) -> float:
        """`num_ahead` > 0: the how manieth it is of those that an earlier scheduler had queued, who all come before
        whatever is submitted now; 0: it is submitted now."""
        if not num_ahead:
            return now_s
        return self._started_at_s - _AHEAD_S * (1 - min(num_ahead, _MAX_AHEAD) / (_MAX_AHEAD + 1))

    def request(
        self, submit: Submit, lane: str, queued_at_s: float, arrived_at_s: float, num_uncached_tokens: int
    ) -> ScheduledRequest:
        """A new record. The lane may be configured no more, if it was granted already."""
        limits, tenant = self._limits.lanes_by_name.get(lane), self._limits.tenant(submit.tenant)
        max_wait_s = limits.max_wait_s if limits else 0.0
        wait_s = min(max_wait_s, submit.deadline_ms / 1000) if submit.deadline_ms else max_wait_s
        ttft_ms = submit.ttft_target_ms or tenant.ttft_slo_ms or (limits.ttft_slo_ms if limits else 0)
        waiting = Waiting(
            submit.request_id,
            arrived_at_s,
            submit.num_prompt_tokens,
            num_uncached_tokens,
            submit.max_tokens,
            queued_at_s + ttft_ms / 1000 if ttft_ms else inf,
            submit.predicted_output_tokens or submit.expected_output_tokens or None,
            submit.output_score,
        )
        return ScheduledRequest(
            submit,
            lane,
            tenant.name,
            queued_at_s,
            queued_at_s + wait_s,
            waiting,
            SchedulingParams(
                self._limits.lane_priorities.get(lane, -1),
                self.rank(waiting),
                submit.itl_target_ms or tenant.itl_slo_ms or (limits.itl_slo_ms if limits else 0),
                submit.predicted_output_tokens,
            ),
        )

    def rank(self, waiting: Waiting) -> float:
        """Inside its lane, where requests of several tenants meet at a worker."""
        return self._policy.order.rank(waiting) if self._policy.is_preemptive else 0.0

    def again(self, request: ScheduledRequest) -> ScheduledRequest:
        """A queued request under these limits and this policy; a lane that is no more becomes the default one."""
        lane = request.lane if request.lane in self._limits.lanes_by_name else self._limits.default_lane
        before = request.waiting
        made = self.request(request.submit, lane, request.queued_at_s, before.arrived_at_s, before.num_uncached_tokens)
        made.missing_since_s = request.missing_since_s
        return made

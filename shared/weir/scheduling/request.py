"""The scheduler's record of one request, and how it is made of its Submit."""

from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from weir.bus.messages import Placement, Submit
from weir.core.life import SchedulingParams
from weir.kv.geometry import num_pages_for
from weir.policy.seams import Policy, Waiting
from weir.scheduling.limits import CoreLimits

PriorityKey = tuple[int, float]
"""(minus the lane's priority, rank inside the lane): the smaller goes first on a worker."""


class PlacementPlan(NamedTuple):
    """Where a request runs, and what was expected there; zeros for one that an earlier scheduler placed."""

    placement: Placement
    num_charged_pages: int
    """That it counts against its lane's share."""
    num_cached_tokens: int = 0
    """Of the prompt, in the arena of its prefill worker."""
    prefill_ms: float = 0.0
    """Of its prompt by itself."""
    itl_ms: float = 0.0
    num_crossing_pages: int = 0
    """Of its prompt, that another host computes."""


@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """Queued while `placement` is None, granted afterwards. Only the core changes it."""

    submit: Submit
    lane: str
    tenant: str
    """A configured one's name, or the default one's."""
    queued_at_s: float
    expires_at_s: float
    waiting: Waiting
    """What the policy knows of it."""
    scheduling: SchedulingParams
    """`lane_priority` -1: of a lane that is configured no more."""
    plan: PlacementPlan | None = None
    num_output_tokens: int = 0
    """Delivered, as far as the scheduler knows."""
    missing_since_s: float | None = None
    """Since when the lists of its gateway lack it."""

    request_id: str = field(init=False)
    priority: PriorityKey = field(init=False)
    num_tokens: int = field(init=False)
    """The most that it can come to."""
    num_pages: int = field(init=False)
    """The most that it can need: what is reserved for it. `CoreLimits.page_overcommit` says how much is risked."""

    def __post_init__(self) -> None:
        submit = self.submit
        self.request_id = submit.request_id
        self.priority = (-self.scheduling.lane_priority, self.scheduling.rank)
        self.num_tokens = submit.num_prompt_tokens + submit.max_tokens
        self.num_pages = num_pages_for(self.num_tokens)

    @property
    def placement(self) -> Placement | None:
        return None if self.plan is None else self.plan.placement

    @property
    def dispatch(self) -> int:
        """Messages about an older one change nothing any more."""
        return self.submit.dispatch if self.plan is None else self.plan.placement.dispatch

    def set_uncached(self, num_tokens: int) -> None:
        """Of a queued request, before a policy that reads it."""
        self.waiting = self.waiting._replace(num_uncached_tokens=num_tokens)

    def set_rank(self, rank: float) -> None:
        """Of a queued request, under another policy."""
        now = self.scheduling
        self.scheduling = SchedulingParams(now.lane_priority, rank, now.itl_target_ms, now.predicted_output_tokens)
        self.priority = (-now.lane_priority, rank)


def num_reserved_pages(submit: Submit) -> int:
    """The worst case: prompt and output bound."""
    return num_pages_for(submit.num_prompt_tokens + submit.max_tokens)


class RequestFactory:
    """Makes records of Submits under one set of limits and one policy."""

    def __init__(self, limits: CoreLimits, policy: Policy) -> None:
        self._limits = limits
        self._policy = policy

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

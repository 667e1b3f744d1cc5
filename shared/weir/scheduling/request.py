"""The scheduler's record of one request."""

from dataclasses import dataclass, field

from weir.bus.messages import Placement, Submit
from weir.core.scheduling import SchedulingParams
from weir.kv.geometry import num_pages_for
from weir.policy.seams import Waiting
from weir.scheduling.placement_plan import NO_PLAN, PlacementPlan


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
    placement: Placement | None = None
    plan: PlacementPlan = NO_PLAN
    """Set by the placer, before `placement` is."""
    num_output_tokens: int = 0
    """Delivered, as far as the scheduler was told."""
    missing_since_s: float | None = None
    """When its gateway first said a list without it."""

    request_id: str = field(init=False)
    priority: tuple[int, float] = field(init=False)
    """(minus the lane's priority, rank inside the lane): who comes first among those on a worker."""
    num_tokens: int = field(init=False)
    """The most that it can come to."""
    num_pages: int = field(init=False)

    def __post_init__(self) -> None:
        submit = self.submit
        self.request_id = submit.request_id
        self.set_rank(self.scheduling.rank)
        self.num_tokens = submit.num_prompt_tokens + submit.max_tokens
        self.num_pages = num_pages_for(self.num_tokens)

    @property
    def dispatch(self) -> int:
        """What is older says nothing any more."""
        return self.submit.dispatch if self.placement is None else self.placement.dispatch

    def set_rank(self, rank: float) -> None:
        """Of one that waits, under another policy."""
        now = self.scheduling
        self.scheduling = SchedulingParams(now.lane_priority, rank, now.itl_target_ms, now.predicted_output_tokens)
        self.priority = (-now.lane_priority, rank)


def num_reserved_pages(submit: Submit) -> int:
    """Pages to book for a request: the worst case. `CoreLimits.page_overcommit` says how much of it is risked."""
    return num_pages_for(submit.num_prompt_tokens + submit.max_tokens)

"""The scheduler's record of one request."""

from dataclasses import dataclass

from weir.bus.messages import Placement, Submit
from weir.kv.geometry import num_pages_for
from weir.scheduling.plan import NO_PLAN, PlacementPlan

Rank = tuple[int, int]
"""Order inside a lane: (0 for what an earlier scheduler had queued, else 1; number of arrival)."""


@dataclass(slots=True, eq=False)
class Request:
    """Queued while `placement` is None, granted afterwards. Only the core changes it."""

    submit: Submit
    lane: str
    rank: Rank
    queued_at_s: float
    expires_at_s: float
    placement: Placement | None = None
    plan: PlacementPlan = NO_PLAN
    """Set by the placer, before `placement` is."""
    missing_since_s: float | None = None
    """When its gateway first said a list without it."""

    @property
    def request_id(self) -> str:
        return self.submit.request_id

    @property
    def num_tokens(self) -> int:
        """The most that it can come to."""
        return self.submit.num_prompt_tokens + self.submit.max_tokens

    @property
    def num_pages(self) -> int:
        return num_booked_pages(self.submit)


def num_booked_pages(submit: Submit) -> int:
    """Pages to book for a request: the worst case. `CoreLimits.page_overcommit` says how much of it is risked."""
    return num_pages_for(submit.num_prompt_tokens + submit.max_tokens)

"""The bounds that the core works under."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from weir.bus.subjects import WORKER_TTL_S

_LANE_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")


@dataclass(frozen=True, slots=True)
class LaneLimits:
    """One lane: its name, how many requests may wait in it, and for how long."""

    name: str
    max_queued: int
    max_wait_s: float

    def __post_init__(self) -> None:
        if not _LANE_NAME.fullmatch(self.name):
            raise ValueError(f"lane {self.name!r}: a name is 1 to 32 of a-z 0-9 _ and begins with a letter")
        if self.max_queued < 1:
            raise ValueError(f"lane {self.name}: max_queued {self.max_queued}, must be at least 1")
        if not 0 < self.max_wait_s <= 86_400:
            raise ValueError(f"lane {self.name}: max_wait_s {self.max_wait_s}, must be over 0 and at most 86400")


DEFAULT_LANES = (
    LaneLimits("interactive", 4000, 60.0),
    LaneLimits("standard", 8000, 120.0),
    LaneLimits("batch", 16_000, 600.0),
)


@dataclass(frozen=True, slots=True)
class CoreLimits:
    """All bounds. `lanes` from the most to the least urgent.

    A prefill worker is given prompts until `max_prefills` or `max_prefill_tokens` are on it (one prompt always fits):
    enough for its next two steps. What is queued there has left the lanes' order for good.
    """

    lanes: tuple[LaneLimits, ...] = DEFAULT_LANES
    default_lane: str = "standard"
    max_prefills: int = 8
    max_prefill_tokens: int = 2048
    page_overcommit: float = 1.0
    """Pages that may be booked, for each page that there is. Above 1, requests that all reach their worst case together
    are more than fit, and decode workers preempt some of them."""
    gather_s: float = 1.5
    worker_ttl_s: float = WORKER_TTL_S
    gateway_ttl_s: float = 5.0
    missing_s: float = 2.0
    """A request that its gateway does not list for this long is freed."""
    max_stall_s: float = 1.0
    """Where this process itself stood still for longer, nobody's silence in that time is held against them."""
    max_tombstones: int = 65_536
    tombstone_ttl_s: float = 60.0
    max_models: int = 1024
    lanes_by_name: Mapping[str, LaneLimits] = field(init=False)

    def __post_init__(self) -> None:
        by_name = {lane.name: lane for lane in self.lanes}
        if not self.lanes or len(by_name) != len(self.lanes):
            raise ValueError(f"lanes {', '.join(lane.name for lane in self.lanes)}: name at least one, each once")
        if self.default_lane not in by_name:
            raise ValueError(f"default_lane {self.default_lane!r}: is none of {', '.join(by_name)}")
        if self.max_prefills < 1 or self.max_prefill_tokens < 1:
            raise ValueError(f"max_prefills {self.max_prefills}, max_prefill_tokens {self.max_prefill_tokens}: below 1")
        if not 1 <= self.page_overcommit <= 100:
            raise ValueError(f"page_overcommit {self.page_overcommit}: must be in [1, 100]")
        object.__setattr__(self, "lanes_by_name", by_name)

    def lane_priority(self, lane: str) -> int:
        """0 for the least urgent lane; one more for each that is more urgent."""
        return len(self.lanes) - 1 - list(self.lanes_by_name).index(lane)


def parse_lane(text: str) -> LaneLimits:
    """NAME:MAX_QUEUED:MAX_WAIT_S. Raises ValueError."""
    name, *numbers = text.split(":")
    try:
        max_queued, max_wait_s = numbers
        return LaneLimits(name, int(max_queued), float(max_wait_s))
    except ValueError as error:
        raise ValueError(f"lane {text!r}: must be NAME:MAX_QUEUED:MAX_WAIT_S ({error})") from error

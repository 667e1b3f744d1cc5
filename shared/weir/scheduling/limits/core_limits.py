"""The bounds that the core works under."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from weir.bus.subjects import WORKER_TTL_S
from weir.scheduling.limits.lane_limits import MAX_COUNT, LaneLimits, TenantLimits, check_key_digests
from weir.scheduling.limits.placing_limits import DEFAULT_PLACING, PlacingLimits
from weir.scheduling.limits.ranges import check_choice, check_range

__all__ = [
    "DEFAULT_LANES",
    "DEFAULT_TENANT",
    "CoreLimits",
    "LaneLimits",
    "LaneOrder",
    "TenantLimits",
    "TenantOrder",
    "parse_lane",
]

LaneOrder = Literal["strict", "weighted"]
TenantOrder = Literal["fair", "arrival"]

DEFAULT_LANES = (
    LaneLimits("interactive", 4000, 60.0),
    LaneLimits("standard", 8000, 120.0),
    LaneLimits("batch", 16_000, 600.0),
)
DEFAULT_TENANT = TenantLimits("default")
_MAX_LANES = 64
_MAX_TENANTS = 4096


@dataclass(frozen=True, slots=True)
class CoreLimits:
    """All bounds. `lanes` from the most to the least urgent; a tenant that is none of `tenants` is `default_tenant`.

    A prefill worker is given prompts of a lane until `max_prefills` or `max_prefill_tokens` of that lane and more
    urgent ones are on it (one prompt always fits): enough for its next two steps.
    """

    lanes: tuple[LaneLimits, ...] = DEFAULT_LANES
    default_lane: str = "standard"
    tenants: tuple[TenantLimits, ...] = ()
    default_tenant: TenantLimits = DEFAULT_TENANT
    admin_key_digests: tuple[str, ...] = ()
    """SHA-256 of the keys of operators, who see and change limits; 64 hex digits each."""
    lane_order: LaneOrder = "strict"
    """Among lanes over their guarantees: the most urgent first, or served tokens in proportion to weights."""
    tenant_order: TenantOrder = "fair"
    """Inside a lane: by virtual token counters, or in one queue whosever the requests are, to compare with; there
    `max_in_flight` of tenants is not held."""
    lent_share: float = 1.0
    """Of a guarantee that lies idle, what others may borrow."""
    max_queued: int = 50_000
    """In all lanes together; over it the least urgent lane's latest requests are given up first."""
    slot_overcommit: float = 0.5
    """Decode slots of a worker that urgent requests may reserve over its own number, as a part of it;
    as many of the least urgent sequences there are paused meanwhile."""
    max_prefills: int = 8
    max_prefill_tokens: int = 2048
    page_overcommit: float = 1.0
    """Pages that may be reserved, for each page that there is. Above 1, requests that all reach their worst case
    together are more than fit, and decode workers preempt some of them."""
    placing: PlacingLimits = DEFAULT_PLACING
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
    tenants_by_name: Mapping[str, TenantLimits] = field(init=False)
    """The default one too."""
    lane_priorities: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self._check_lanes()
        self._check_tenants()
        for name, low, high in (
            ("max_prefills", 1, MAX_COUNT),
            ("max_prefill_tokens", 1, MAX_COUNT),
            ("page_overcommit", 1, 100),
            ("lent_share", 0, 1),
            ("slot_overcommit", 0, 10),
            ("max_queued", 1, 10**7),
        ):
            check_range(self, name, low, high)
        by_name = {lane.name: lane for lane in self.lanes}
        priorities = {name: len(self.lanes) - 1 - index for index, name in enumerate(by_name)}
        object.__setattr__(self, "lanes_by_name", by_name)
        object.__setattr__(self, "lane_priorities", priorities)
        tenants_by_name = {tenant.name: tenant for tenant in (*self.tenants, self.default_tenant)}
        object.__setattr__(self, "tenants_by_name", tenants_by_name)

    @property
    def has_tenant_keys(self) -> bool:
        """Whether every request needs a key."""
        return any(tenant.api_key_digests for tenant in self.tenants_by_name.values())

    def lane_priority(self, lane: str) -> int:
        """0 for the least urgent lane; one more for each that is more urgent. Raises KeyError for an unknown one."""
        return self.lane_priorities[lane]

    def tenant(self, name: str) -> TenantLimits:
        return self.tenants_by_name.get(name, self.default_tenant)

    def _check_lanes(self) -> None:
        names = [lane.name for lane in self.lanes]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"lanes {', '.join(names)}: name at least one, each once")
        if len(names) > _MAX_LANES:
            raise ValueError(f"lanes: {len(names)}, must be at most {_MAX_LANES}")
        check_choice(self, "default_lane", names)
        check_choice(self, "lane_order", get_args(LaneOrder))
        check_choice(self, "tenant_order", get_args(TenantOrder))
        total = sum(lane.guaranteed_share for lane in self.lanes)
        if total > 1 + 1e-9:
            raise ValueError(f"guaranteed_share: lanes have {total:g} in all, must be at most 1")

    def _check_tenants(self) -> None:
        tenants = (*self.tenants, self.default_tenant)
        if len(tenants) > _MAX_TENANTS:
            raise ValueError(f"tenants: {len(tenants)}, must be at most {_MAX_TENANTS}")
        names = Counter(tenant.name for tenant in tenants)
        digests = Counter(digest for tenant in tenants for digest in tenant.api_key_digests)
        for name, count in names.items():
            if count > 1:
                raise ValueError(f"tenant {name}: named {count} times, must be named once")
        for digest, count in digests.items():
            if count > 1:
                raise ValueError(f"api_key_digests {digest[:8]}...: belongs to {count} tenants, must belong to one")
        check_key_digests("admin_key_digests", self.admin_key_digests)
        for digest in self.admin_key_digests:
            if digest in digests:
                raise ValueError(f"admin_key_digests {digest[:8]}...: is a tenant's; give operators keys of their own")
        known = {lane.name for lane in self.lanes}
        for tenant in tenants:
            for lane in tenant.lanes:
                if lane not in known:
                    raise ValueError(f"tenant {tenant.name}: lanes {lane!r}, is none of {', '.join(sorted(known))}")


def parse_lane(text: str) -> LaneLimits:
    """NAME:MAX_QUEUED:MAX_WAIT_S. Raises ValueError."""
    name, *numbers = text.split(":")
    try:
        max_queued, max_wait_s = numbers
        return LaneLimits(name, int(max_queued), float(max_wait_s))
    except ValueError as error:
        raise ValueError(f"lane {text!r}: must be NAME:MAX_QUEUED:MAX_WAIT_S ({error})") from error

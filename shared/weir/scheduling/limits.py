"""The bounds that the scheduler works under: of lanes, of tenants, of placing, and all of them together."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from weir.bus.subjects import WORKER_TTL_S
from weir.core.caps import RequestCaps
from weir.core.fields import check_choice, check_range
from weir.kv.geometry import num_pages_for
from weir.scheduling.worker_limits import WorkerLimits

_LANE_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_GROUP_NAME = re.compile(r"[A-Za-z0-9_-]{0,40}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MIN_WAIT_S = 0.001
_MAX_WAIT_S = 86_400
MAX_COUNT = 10**9
_WEIGHTS = (0.001, 1000)
_MAX_SLO_MS = 3_600_000
_CAPS = ("max_n", "max_top_k", "max_output_tokens", "max_sequence_tokens")
"""Fields of a lane and of a tenant that are those of `RequestCaps`."""


@dataclass(frozen=True, slots=True)
class LaneLimits:
    """One lane. Raises ValueError that names the field, its value and what it must be.

    `weight` counts against other lanes' where `CoreLimits.lane_order` is weighted. `guaranteed_share` is of the pages
    of each host, `guaranteed_step_share` of the prompt tokens of each worker's step: what of either lies idle is lent.
    A request that waited `ageing_s` counts as one lane more urgent, twice
    as long as two (0: never). SLOs are the targets of requests that name none (0: none). At most `max_batch` requests
    of the lane run at a time (0: no bound). `worker_group`: workers that no other lane gets (empty: the common ones).
    The last four cap what one request may ask for, as in `RequestCaps`.
    """

    name: str
    max_queued: int
    max_wait_s: float
    weight: float = 1.0
    guaranteed_share: float = 0.0
    ageing_s: float = 0.0
    ttft_slo_ms: int = 0
    itl_slo_ms: int = 0
    max_batch: int = 0
    worker_group: str = ""
    guaranteed_step_share: float = 0.0
    max_n: int = 0
    max_top_k: int = 0
    max_output_tokens: int = 0
    max_sequence_tokens: int = 0

    def __post_init__(self) -> None:
        if not _LANE_NAME.fullmatch(self.name):
            raise ValueError(f"lane {self.name!r}: a name is 1 to 32 of a-z 0-9 _ and begins with a letter")
        what = f"lane {self.name}"
        for name, low, high in (
            ("max_queued", 1, MAX_COUNT),
            ("max_wait_s", _MIN_WAIT_S, _MAX_WAIT_S),
            ("weight", *_WEIGHTS),
            ("guaranteed_share", 0, 1),
            ("guaranteed_step_share", 0, 1),
            ("ageing_s", 0, _MAX_WAIT_S),
            ("ttft_slo_ms", 0, _MAX_SLO_MS),
            ("itl_slo_ms", 0, _MAX_SLO_MS),
            *((name, 0, MAX_COUNT) for name in ("max_batch", *_CAPS)),
        ):
            check_range(self, name, low, high, of=what)
        if not _GROUP_NAME.fullmatch(self.worker_group):
            raise ValueError(f"{what}: worker_group {self.worker_group!r}, must be at most 40 of A-Z a-z 0-9 _ -")

    @property
    def caps(self) -> RequestCaps:
        return RequestCaps(self.max_n, self.max_top_k, self.max_output_tokens, self.max_sequence_tokens)


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """One tenant; 0 is no limit. Raises ValueError that names the field, its value and what it must be.

    `weight`: its share of service beside other tenants of a lane. `max_queued` bounds what waits, `max_in_flight` what
    runs at a time. SLOs go before its lane's, and behind a request's own targets. `isolates_cache`: it shares no
    prefix with others. `api_key_digests`: SHA-256 of its keys, 64 hex digits each. `lanes`: those it may use; empty:
    all. The last four cap what one request may ask for, as in `RequestCaps`.
    """

    name: str
    weight: float = 1.0
    requests_per_min: float = 0.0
    tokens_per_min: float = 0.0
    max_queued: int = 0
    max_in_flight: int = 0
    ttft_slo_ms: int = 0
    itl_slo_ms: int = 0
    isolates_cache: bool = False
    api_key_digests: tuple[str, ...] = ()
    lanes: tuple[str, ...] = ()
    max_n: int = 0
    max_top_k: int = 0
    max_output_tokens: int = 0
    max_sequence_tokens: int = 0

    def __post_init__(self) -> None:
        if not _TENANT_NAME.fullmatch(self.name):
            raise ValueError(f"tenant {self.name!r}: a name is 1 to 64 of A-Z a-z 0-9 _ - and begins with no sign")
        what = f"tenant {self.name}"
        check_range(self, "weight", *_WEIGHTS, of=what)
        for name in ("requests_per_min", "tokens_per_min", "max_queued", "max_in_flight", *_CAPS):
            check_range(self, name, 0, MAX_COUNT, of=what)
        for name in ("ttft_slo_ms", "itl_slo_ms"):
            check_range(self, name, 0, _MAX_SLO_MS, of=what)
        check_key_digests(f"{what}: api_key_digests", self.api_key_digests)

    @property
    def caps(self) -> RequestCaps:
        return RequestCaps(self.max_n, self.max_top_k, self.max_output_tokens, self.max_sequence_tokens)


def check_key_digests(what: str, digests: Iterable[str]) -> None:
    """Raises ValueError that begins with `what`. Whatever stands there may be a key by mistake: it is not repeated."""
    if not all(_DIGEST.fullmatch(digest) for digest in digests):
        raise ValueError(f"{what}: one is not 64 hex digits; give the key's SHA-256, not the key")


MemoryFitName = Literal["conservative", "aggressive", "past-future", "predicted"]
Crossing = Literal["nothing", "prefixes", "prompts"]
RouterName = Literal["estimated-ttft", "least-load", "longest-prefix", "random"]


@dataclass(frozen=True, slots=True)
class PlacingLimits:
    """How requests are placed, and how much memory they are taken to need.

    `router` and `memory_fit` beside the defaults are baselines to measure against; `predicted` wants a predictor
    for every request, and takes its lengths for the truth."""

    memory_fit: MemoryFitName = "conservative"
    memory_reserve: float = 0.05
    """Part of an arena that the past-future test leaves free: for what lengths of the past do not tell."""
    router: RouterName = "estimated-ttft"
    small_pool: int = 16
    """Pools of at most this many workers, or workers with a slot, are looked through; of larger ones a few, sampled at
    random."""
    itl_weight: float = 10.0
    """Milliseconds to the first token that one between two tokens is worth."""
    prefill_weight: float = 0.2
    """What a millisecond of a worker's prefill counts against one to the first token: others wait for it."""
    hand_off_ms: float = 1.0
    hand_off_page_ms: float = 0.0
    """For each page of the prompt; 0 where pages change owner and do not move."""
    local_harm: float = 0.1
    """What a millisecond by which each running sequence is delayed counts against one to the first token."""
    local_gain: float = 0.25
    """A request is prefilled by its decode worker only where that is cheaper by this part."""
    link_mbit_s: float = 1000.0
    """Of links between hosts that nobody has measured lately."""
    link_round_trip_ms: float = 10.0
    fetch_gain: float = 0.3
    """A prefix comes from another host only where that is sooner than computing it by this part."""
    crossing: Crossing = "prompts"
    """What passes between hosts that exchange pages: nothing, prefixes that one of them has, or prompts too, which one
    of them computes for the other."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice(self, "memory_fit", get_args(MemoryFitName))
        check_choice(self, "router", get_args(RouterName))
        check_choice(self, "crossing", get_args(Crossing))
        for name, low, high in (
            ("memory_reserve", 0, 0.9),
            ("small_pool", 2, 1024),
            ("itl_weight", 0, 10_000),
            ("prefill_weight", 0, 100),
            ("hand_off_ms", 0, 60_000),
            ("hand_off_page_ms", 0, 1000),
            ("local_harm", 0, 100),
            ("local_gain", 0, 0.99),
            ("link_mbit_s", 0.001, 10**6),
            ("link_round_trip_ms", 0, 60_000),
            ("fetch_gain", 0, 0.99),
            ("seed", 0, 2**63 - 1),
        ):
            check_range(self, name, low, high)

    def hand_off_time_ms(self, num_prompt_tokens: int) -> float:
        """From the end of the prefill until the decode worker can go on."""
        if not self.hand_off_page_ms:
            return self.hand_off_ms
        return self.hand_off_ms + self.hand_off_page_ms * num_pages_for(num_prompt_tokens)


DEFAULT_PLACING = PlacingLimits()

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
_MAX_WORKERS = 256


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
    workers: tuple[WorkerLimits, ...] = ()
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
    rebalances: bool = False
    """Whether running sequences go on at other hosts where that evens out decode workers, or makes room for a large
    request."""
    placing: PlacingLimits = DEFAULT_PLACING
    gather_s: float = 1.0
    worker_ttl_s: float = WORKER_TTL_S
    gateway_ttl_s: float = 5.0
    missing_s: float = 2.0
    """A request that its gateway does not list for this long is freed."""
    max_stall_s: float = 1.0
    """Where this process itself stood still for longer, nobody's silence in that time is held against them."""
    max_tombstones: int = 65_536
    tombstone_ttl_s: float = 60.0
    max_models: int = 1024
    lane_groups: tuple[tuple[str, str], ...] = ()
    """(lane, worker group) of lanes that name none themselves: of whoever has started the workers."""
    lanes_by_name: Mapping[str, LaneLimits] = field(init=False)
    tenants_by_name: Mapping[str, TenantLimits] = field(init=False)
    """The default one too."""
    lane_priorities: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self._check_lanes()
        self._give_groups()
        self._check_tenants()
        self._check_workers()
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

    @property
    def step_shares(self) -> tuple[float, ...]:
        """`guaranteed_step_share` by lane priority: the least urgent lane first. Empty: no lane has any."""
        shares = tuple(lane.guaranteed_step_share for lane in reversed(self.lanes))
        return shares if any(shares) else ()

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
        for name in ("guaranteed_share", "guaranteed_step_share"):
            total = sum(getattr(lane, name) for lane in self.lanes)
            if total > 1 + 1e-9:
                raise ValueError(f"{name}: lanes have {total:g} in all, must be at most 1")

    def _give_groups(self) -> None:
        groups, known = dict(self.lane_groups), [lane.name for lane in self.lanes]
        for name, group in groups.items():
            if name not in known:
                raise ValueError(f"lane_groups {name}={group}: there is no such lane, only {', '.join(known)}")
        lanes = (replace(lane, worker_group=lane.worker_group or groups.get(lane.name, "")) for lane in self.lanes)
        object.__setattr__(self, "lanes", tuple(lanes))

    def _check_workers(self) -> None:
        names = [one.name for one in self.workers]
        if len(set(names)) != len(names) or len(names) > _MAX_WORKERS:
            raise ValueError(f"workers: {len(names)} entries, must be at most {_MAX_WORKERS}, each name once")

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


def parse_lane_group(text: str) -> tuple[str, str]:
    """LANE=GROUP. Raises ValueError."""
    lane, sign, group = text.partition("=")
    if not sign or not group or not _LANE_NAME.fullmatch(lane) or not _GROUP_NAME.fullmatch(group):
        raise ValueError(f"lane_groups {text!r}: must be LANE=GROUP, such as interactive=fast")
    return lane, group


def parse_lane(text: str) -> LaneLimits:
    """NAME:MAX_QUEUED:MAX_WAIT_S. Raises ValueError."""
    name, *numbers = text.split(":")
    try:
        max_queued, max_wait_s = numbers
        return LaneLimits(name, int(max_queued), float(max_wait_s))
    except ValueError as error:
        raise ValueError(f"lane {text!r}: must be NAME:MAX_QUEUED:MAX_WAIT_S ({error})") from error

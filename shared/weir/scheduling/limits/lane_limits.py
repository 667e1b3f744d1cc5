"""What one lane and what one tenant may take."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from weir.scheduling.limits.ranges import check_range

_LANE_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_GROUP_NAME = re.compile(r"[A-Za-z0-9_-]{0,40}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MIN_WAIT_S = 0.001
_MAX_WAIT_S = 86_400
MAX_COUNT = 10**9
_WEIGHTS = (0.001, 1000)
_MAX_SLO_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class LaneLimits:
    """One lane. Raises ValueError that names the field, its value and what it must be.

    `weight` counts against other lanes' where `CoreLimits.lane_order` is weighted. `guaranteed_share` is of the pages
    of each host: what of it lies idle is lent. A request that waited `ageing_s` counts as one lane more urgent, twice
    as long as two (0: never). SLOs are the targets of requests that name none (0: none). At most `max_batch` requests
    of the lane run at a time (0: no bound). `worker_group`: workers that no other lane gets (empty: the common ones).
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

    def __post_init__(self) -> None:
        if not _LANE_NAME.fullmatch(self.name):
            raise ValueError(f"lane {self.name!r}: a name is 1 to 32 of a-z 0-9 _ and begins with a letter")
        what = f"lane {self.name}"
        for name, low, high in (
            ("max_queued", 1, MAX_COUNT),
            ("max_wait_s", _MIN_WAIT_S, _MAX_WAIT_S),
            ("weight", *_WEIGHTS),
            ("guaranteed_share", 0, 1),
            ("ageing_s", 0, _MAX_WAIT_S),
            ("ttft_slo_ms", 0, _MAX_SLO_MS),
            ("itl_slo_ms", 0, _MAX_SLO_MS),
            ("max_batch", 0, MAX_COUNT),
        ):
            check_range(self, name, low, high, of=what)
        if not _GROUP_NAME.fullmatch(self.worker_group):
            raise ValueError(f"{what}: worker_group {self.worker_group!r}, must be at most 40 of A-Z a-z 0-9 _ -")


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """One tenant; 0 is no limit. Raises ValueError that names the field, its value and what it must be.

    `weight`: its share of service beside other tenants of a lane. `max_queued` bounds what waits, `max_in_flight` what
    runs at a time. SLOs go before its lane's, and behind a request's own targets. `isolates_cache`: it shares no
    prefix with others. `api_key_digests`: SHA-256 of its keys, 64 hex digits each. `lanes`: those it may use; empty:
    all.
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

    def __post_init__(self) -> None:
        if not _TENANT_NAME.fullmatch(self.name):
            raise ValueError(f"tenant {self.name!r}: a name is 1 to 64 of A-Z a-z 0-9 _ - and begins with no sign")
        what = f"tenant {self.name}"
        check_range(self, "weight", *_WEIGHTS, of=what)
        for name in ("requests_per_min", "tokens_per_min", "max_queued", "max_in_flight"):
            check_range(self, name, 0, MAX_COUNT, of=what)
        for name in ("ttft_slo_ms", "itl_slo_ms"):
            check_range(self, name, 0, _MAX_SLO_MS, of=what)
        check_key_digests(f"{what}: api_key_digests", self.api_key_digests)


def check_key_digests(what: str, digests: Iterable[str]) -> None:
    """Raises ValueError that begins with `what`. Whatever stands there may be a key by mistake: it is not repeated."""
    if not all(_DIGEST.fullmatch(digest) for digest in digests):
        raise ValueError(f"{what}: one is not 64 hex digits; give the key's SHA-256, not the key")

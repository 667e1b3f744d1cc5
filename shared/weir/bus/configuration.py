"""What the scheduler writes into the configuration bucket: for gateways, for workers, and for the next scheduler.

The leader alone writes. Every value is whole, so that a reader never sees half of a change; whoever watches the bucket
hears of a change at once, and of everything again after a reconnect.
"""

from dataclasses import dataclass

ACCESS_KEY = "access"
"""-> AccessRules. Read by gateways."""
POLICY_KEY = "policy"
"""-> PolicyChoice. Read by workers and by the next scheduler."""
OVERRIDES_KEY = "overrides"
"""-> LimitsOverrides. Read by the next scheduler."""

DIGEST_BYTES = 32
"""Of an API key: its SHA-256. The keys themselves are known to their clients alone."""


@dataclass(frozen=True, slots=True)
class LaneAccess:
    """One lane as gateways know it."""

    name: str
    ttft_slo_ms: int = 0
    itl_slo_ms: int = 0


@dataclass(frozen=True, slots=True)
class TenantAccess:
    """Who a client is that shows one of these keys, and what it may ask for."""

    name: str
    key_digests: tuple[bytes, ...] = ()
    lanes: tuple[str, ...] = ()
    """The first is its default. Empty: all of them."""
    isolates_cache: bool = False
    """Its prompts share cached pages with nobody else's."""

    def __post_init__(self) -> None:
        wrong = next((digest for digest in self.key_digests if len(digest) != DIGEST_BYTES), None)
        if wrong is not None:
            raise ValueError(f"tenant {self.name}: a key digest has {len(wrong)} bytes, must have {DIGEST_BYTES}")


@dataclass(frozen=True, slots=True)
class AccessRules:
    """Who may ask for what."""

    epoch: int
    """Of the scheduler that wrote it."""
    lanes: tuple[LaneAccess, ...]
    """From the most to the least urgent."""
    default_lane: str
    default_tenant: str
    """Of whoever shows no key that is known; it is nobody's once any tenant has keys."""
    tenants: tuple[TenantAccess, ...] = ()


@dataclass(frozen=True, slots=True)
class PolicyParam:
    """One parameter of a policy."""

    name: str
    value: float


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """The policy of the scheduler and of every worker: what `weir.policy.registry.make_policy` takes."""

    epoch: int
    name: str
    params: tuple[PolicyParam, ...] = ()
    configured: str = ""
    """What the scheduler's own configuration said when this was chosen; once that changes, it wins."""


@dataclass(frozen=True, slots=True)
class LimitsOverride:
    """One setting that was changed at run time: a dotted key of the limits file, and its value in TOML."""

    key: str
    value: str


@dataclass(frozen=True, slots=True)
class LimitsOverrides:
    """What was changed at run time, over which file; once the file says something else, it wins."""

    epoch: int
    file_digest: str
    entries: tuple[LimitsOverride, ...] = ()

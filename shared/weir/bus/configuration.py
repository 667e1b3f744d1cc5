"""What the scheduler writes into the configuration bucket: for gateways, for workers, and for the next scheduler.

The leader alone writes. Every value is whole, so that nobody sees half of a change; whoever watches the bucket
hears of a change at once, and of everything again after a reconnect.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Never, TypeVar

from weir.bus.codec import MalformedMessage, decode
from weir.bus.protocol import BucketMismatch, Bus, BusError, KvEntry
from weir.bus.subjects import Subjects, is_worker_named
from weir.core.caps import NO_CAPS, RequestCaps

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

logger = logging.getLogger(__name__)

ACCESS_KEY = "access"
"""-> AccessRules. Read by gateways."""
POLICY_KEY = "policy"
"""-> PolicyChoice. Read by workers and by the next scheduler."""
LIMITS_KEY = "limits"
"""-> LimitsInForce. Read by the next scheduler."""
WORKERS_KEY = "workers"
"""-> WorkerRules. Read by workers."""

DIGEST_BYTES = 32
"""Of an API key: its SHA-256. The keys themselves are known to their clients alone."""

_RETRY_S = 0.5

ValueT = TypeVar("ValueT", bound="DataclassInstance")


@dataclass(frozen=True, slots=True)
class TenantAccess:
    """Who a client is that shows one of these keys, and what it may ask for."""

    name: str
    key_digests: tuple[bytes, ...] = ()
    lanes: tuple[str, ...] = ()
    """The first is its default. Empty: all of them."""
    isolates_cache: bool = False
    """Its prompts share cached pages with nobody else's."""
    caps: RequestCaps = NO_CAPS
    requests_per_min: float = 0.0
    """For calls that no scheduler hears of. 0.0: not bounded."""

    def __post_init__(self) -> None:
        wrong = next((digest for digest in self.key_digests if len(digest) != DIGEST_BYTES), None)
        if wrong is not None:
            raise ValueError(f"tenant {self.name}: a key digest has {len(wrong)} bytes, must have {DIGEST_BYTES}")


@dataclass(frozen=True, slots=True)
class LaneCaps:
    """What one request of a lane may ask for."""

    lane: str
    caps: RequestCaps


@dataclass(frozen=True, slots=True)
class AccessRules:
    """Who may ask for what."""

    epoch: int
    """Of the scheduler that wrote it."""
    lanes: tuple[str, ...]
    """From the most to the least urgent."""
    default_lane: str
    default_tenant: str
    """Of whoever shows no key that is known; it is nobody's once any tenant has keys."""
    tenants: tuple[TenantAccess, ...] = ()
    lane_caps: tuple[LaneCaps, ...] = ()
    """Of the lanes that have any."""
    admin_key_digests: tuple[bytes, ...] = ()
    """Of operators: those of the limits, and of the scheduler's own key file."""
    asks_operators: bool = False
    """Whether an operator's key is needed: once the limits hold anybody's."""

    def __post_init__(self) -> None:
        wrong = next((digest for digest in self.admin_key_digests if len(digest) != DIGEST_BYTES), None)
        if wrong is not None:
            raise ValueError(f"an admin key digest has {len(wrong)} bytes, must have {DIGEST_BYTES}")
        names = set(self.lanes)
        if self.default_lane not in names:
            raise ValueError(f"default_lane {self.default_lane!r}: is none of {', '.join(sorted(names))}")
        for tenant in self.tenants:
            if not names.issuperset(tenant.lanes):
                raise ValueError(f"tenant {tenant.name}: lanes {', '.join(tenant.lanes)} are not all lanes")


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """The policy of the scheduler and of every worker."""

    epoch: int
    policy: str
    """What `weir.policy.registry.PolicySpec` parses."""
    configured: str = ""
    """What the scheduler's own configuration said when this was chosen; once that changes, it wins."""


@dataclass(frozen=True, slots=True)
class WorkerBounds:
    """Of every worker that this names: its role (decode), its number (decode-0), or its id. 0: as it was started."""

    name: str
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0

    def is_of(self, worker_id: str) -> bool:
        return is_worker_named(worker_id, self.name)


@dataclass(frozen=True, slots=True)
class WorkerRules:
    """What workers go by beside the policy."""

    epoch: int
    bounds: tuple[WorkerBounds, ...] = ()
    step_shares: tuple[float, ...] = ()
    """Guaranteed of the prompt tokens of a step, by lane priority: the least urgent lane first. Empty: none has any."""


@dataclass(frozen=True, slots=True)
class LimitsOverride:
    """One setting that was changed at run time: a dotted key of the limits file, and its value in TOML."""

    key: str
    value: str


@dataclass(frozen=True, slots=True)
class LimitsInForce:
    """The limits file that was read last without a fault, and what was changed at run time over it.

    Once the file says something else it wins. A scheduler that starts beside a faulty file goes on from this one.
    """

    epoch: int
    file_digest: str
    """SHA-256 of the file; empty: there is none."""
    file_text: bytes = b""
    """Empty where it is too long for a message."""
    overrides: tuple[LimitsOverride, ...] = ()
    tuned: tuple[LimitsOverride, ...] = ()
    """Bounds of workers that a tuner has kept. What it tries is not here: it ends with the scheduler that it asked."""


Written = AccessRules | PolicyChoice | LimitsInForce | WorkerRules
MESSAGE_TYPES: Mapping[str, type[Written]] = {
    ACCESS_KEY: AccessRules,
    POLICY_KEY: PolicyChoice,
    LIMITS_KEY: LimitsInForce,
    WORKERS_KEY: WorkerRules,
}


class ConfigurationWatch(Generic[ValueT]):
    """Follows one key: what the scheduler writes there reaches a callback.

    Outlives the loss of the bus and defects of the callback; what cannot be decoded changes nothing.

    The same value may come twice, and that of a scheduler that was replaced may come late: the callback compares
    epochs.
    """

    def __init__(
        self,
        key: str,
        value_type: type[ValueT],
        on_value: Callable[[ValueT], None],
        *,
        retried: tuple[type[Exception], ...] = (),
    ) -> None:
        """`retried`: raised by `on_value` for a value that it cannot take now and wants once more."""
        self._key = key
        self._value_type = value_type
        self._on_value = on_value
        self._retried: tuple[type[Exception], ...] = (BusError, *retried)
        self._has_told = False
        self.num_malformed = 0
        self.num_failures = 0
        """Errors that are none of the bus and none of `retried`."""

    async def follow(self, bus: Bus, subjects: Subjects) -> Never:
        """Runs until it is cancelled. The bus stays the caller's."""
        while True:
            try:
                bucket = await bus.open_bucket(subjects.configuration_bucket)
                async for entry in bucket.watch():
                    if entry.key == self._key:
                        self._take(entry)
            except self._retried as error:  # whoever watches anew gets the present value again
                level = logging.ERROR if isinstance(error, BucketMismatch) and not self._has_told else logging.DEBUG
                self._has_told = self._has_told or level == logging.ERROR
                logger.log(level, "watching the key %s: %s; again", self._key, error)
            except Exception:  # the boundary of a task that nobody awaits
                self.num_failures += 1
                if self.num_failures == 1:
                    logger.exception("watching the key %s failed (further failures are only counted)", self._key)
            await asyncio.sleep(_RETRY_S)

    def _take(self, entry: KvEntry) -> None:
        if entry.value is None:
            logger.warning("the key %s was deleted; its last value stays in force", self._key)
            return
        try:
            value = decode(self._value_type, entry.value)
        except MalformedMessage as error:
            self.num_malformed += 1
            logger.error("malformed value of the key %s, the last one stays in force: %s", self._key, error)
            return
        self._on_value(value)

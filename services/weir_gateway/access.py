"""Who sends a request, by its key, and what that tenant may ask for, by the rules that the scheduler writes."""

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from weir.bus.configuration import ACCESS_KEY, AccessRules, ConfigurationWatch, TenantAccess
from weir.bus.protocol import Bus
from weir.bus.subjects import Subjects
from weir.core.caps import NO_CAPS, RequestCaps
from weir.core.credentials import key_digest
from weir.core.errors import FieldViolation, InvalidRequest, PermissionDenied, Unauthenticated, Unavailable
from weir_gateway.caps import NO_CAPS_IN_FORCE, CapsInForce

logger = logging.getLogger(__name__)

_LOOKUP_BYTES = 16
_UNKNOWN_RULES_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request. `lanes` are open to it, from the most to the least urgent."""

    tenant: str
    lanes: tuple[str, ...]
    default_lane: str
    all_lanes: tuple[str, ...]
    isolates_cache: bool = False
    caps: RequestCaps = NO_CAPS
    lane_caps: Mapping[str, RequestCaps] = field(default_factory=dict)
    has_peers: bool = False
    """Whether another tenant has a key too: then something is left for it of whatever all share."""
    requests_per_min: float = 0.0
    """0.0: not bounded."""


@dataclass(frozen=True, slots=True)
class RequestScope:
    """What the rules make of one request."""

    tenant: str
    lane: str
    cache_salt: str
    """The request's own, or one that only its tenant can have."""
    caps: CapsInForce = NO_CAPS_IN_FORCE


class AccessControl:
    """The rules as they are now. Nobody is let in before they are known."""

    def __init__(self, *, is_lower_priority_first: bool = False) -> None:
        self._is_lower_priority_first = is_lower_priority_first
        self._rules: AccessRules | None = None
        self._by_digest: Mapping[bytes, tuple[bytes, Caller]] = {}
        self._anonymous: Caller | None = None
        self._by_tenant: Mapping[str, Caller] = {}

    def update(self, rules: AccessRules) -> bool:
        """False: they are those of a scheduler that was replaced."""
        if self._rules is not None and rules.epoch < self._rules.epoch:
            return False
        by_digest: dict[bytes, tuple[bytes, Caller]] = {}
        for tenant in rules.tenants:
            caller = _caller(tenant, rules)
            by_digest |= {digest[:_LOOKUP_BYTES]: (digest, caller) for digest in tenant.key_digests}
        default = next((t for t in rules.tenants if t.name == rules.default_tenant), TenantAccess(rules.default_tenant))
        self._rules = rules
        self._by_digest = by_digest
        self._anonymous = None if by_digest else _caller(default, rules)
        self._by_tenant = {tenant.name: _caller(tenant, rules) for tenant in (default, *rules.tenants)}
        return True

    @property
    def lanes(self) -> tuple[str, ...]:
        """All of them, from the most to the least urgent; none before the rules are known."""
        return () if self._rules is None else self._rules.lanes

    def identify(self, api_key: str | None) -> Caller:
        """Raises Unauthenticated where keys are asked for, and Unavailable before the rules are known."""
        self._known_rules()
        if self._anonymous is not None:
            return self._anonymous
        if api_key is None:
            raise Unauthenticated("an API key is needed: send Authorization: Bearer KEY, or X-API-Key: KEY")
        digest = key_digest(api_key)
        # The look-up's time depends on a digest, of which nobody can choose the bytes; the rest is compared
        # in constant time.
        known, caller = self._by_digest.get(digest[:_LOOKUP_BYTES], (b"", None))
        if caller is None or not hmac.compare_digest(known, digest):
            raise Unauthenticated("the API key is not known")
        return caller

    def caller_of(self, tenant: str) -> Caller:
        """For work that a tenant left here. Raises PermissionDenied for one that is none any more, and Unavailable."""
        self._known_rules()
        caller = self._by_tenant.get(tenant)
        if caller is None:
            raise PermissionDenied(f"{tenant!r} is no tenant any more")
        return caller

    def check_operator(self, key: str | None, *, is_from_here: bool) -> None:
        """As the scheduler does: a key once anybody has one. Where nobody has, whoever asks from this host, or shows
        the key that hosts of the stack share.

        Raises Unauthenticated, PermissionDenied, or Unavailable before the rules are known.
        """
        rules = self._known_rules()
        if not rules.asks_operators and not self._by_digest:
            if not is_from_here and not self._is_admin(key):
                raise PermissionDenied(
                    "without keys operators are answered on the gateway's own host alone: ask from there, or put "
                    "admin_key_digests into the limits file (`weir limits key` makes one)"
                )
            return
        if key is None:
            raise Unauthenticated("an admin key is needed: send Authorization: Bearer KEY, or give --admin-key")
        if not self._is_admin(key):
            digest = key_digest(key)
            if digest[:_LOOKUP_BYTES] in self._by_digest:
                raise PermissionDenied("this is a tenant's key: what operators see takes one of admin_key_digests")
            raise Unauthenticated("the admin key is not known")

    def _is_admin(self, key: str | None) -> bool:
        digests = self._known_rules().admin_key_digests
        return key is not None and any(hmac.compare_digest(key_digest(key), admin) for admin in digests)

    def _known_rules(self) -> AccessRules:
        """Raises Unavailable."""
        if self._rules is None:
            message = "the rules of access are not known yet; try again"
            raise Unavailable(message, retry_after_s=_UNKNOWN_RULES_RETRY_S)
        return self._rules

    def scope_of(
        self, caller: Caller, names: Mapping[str, str], lane: str, priority: int | None, cache_salt: str
    ) -> RequestScope:
        """`names`: what the client calls the fields. Raises InvalidRequest for a lane that there is not, and
        PermissionDenied for one that is not the caller's.
        """
        if lane and priority is not None:
            violation = FieldViolation(names["priority"], f"is {priority}, with {names['lane']}: give one of them")
            raise InvalidRequest([violation])
        chosen = self._lane_of(caller, priority) if priority is not None else lane or caller.default_lane
        if chosen not in caller.all_lanes:
            known = ", ".join(caller.all_lanes)
            raise InvalidRequest([FieldViolation(names["lane"], f"lane {chosen[:80]!r} is none of {known}")])
        if chosen not in caller.lanes:
            raise PermissionDenied(
                f"{names['lane']}: lane {chosen!r} is not open to tenant {caller.tenant!r}; "
                f"it may use {', '.join(caller.lanes)}"
            )
        salt = _tenant_salt(caller.tenant, cache_salt) if caller.isolates_cache else cache_salt
        lane_caps = caller.lane_caps.get(chosen, NO_CAPS)
        if caller.caps == NO_CAPS and lane_caps == NO_CAPS:
            return RequestScope(caller.tenant, chosen, salt)
        return RequestScope(caller.tenant, chosen, salt, CapsInForce.of(caller.tenant, caller.caps, chosen, lane_caps))

    def _lane_of(self, caller: Caller, priority: int) -> str:
        """0 is the default lane, each step of priority one lane up, as far as there are lanes."""
        steps = -priority if self._is_lower_priority_first else priority
        index = caller.lanes.index(caller.default_lane) - steps
        return caller.lanes[min(max(index, 0), len(caller.lanes) - 1)]


class AccessWatch:
    """Rules that cannot be decoded change nothing: the known ones stay in force."""

    def __init__(self, access: AccessControl) -> None:
        self._access = access
        self._watch = ConfigurationWatch(ACCESS_KEY, AccessRules, self._take)
        self._is_known = asyncio.Event()
        self._num_changes = 0

    async def follow(self, bus: Bus, subjects: Subjects) -> None:
        """Runs for ever: without changes, a gateway would go on letting in whose key was taken away."""
        await self._watch.follow(bus, subjects)

    async def wait_known(self, timeout_s: float) -> bool:
        """Whether the rules are known by then."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_known.wait()
        except TimeoutError:
            return False
        return True

    def metrics(self) -> dict[str, float]:
        return {
            "access_rules_known": float(self._is_known.is_set()),
            "access_rules_changes_total": float(self._num_changes),
            "access_rules_malformed_total": float(self._watch.num_malformed),
            "access_rules_failures_total": float(self._watch.num_failures),
        }

    def _take(self, rules: AccessRules) -> None:
        if self._access.update(rules):
            self._num_changes += 1
            self._is_known.set()
            num_keys = sum(len(tenant.key_digests) for tenant in rules.tenants)
            logger.info(
                "rules of access: %d lanes, %d tenants, %d keys", len(rules.lanes), len(rules.tenants), num_keys
            )


def _caller(tenant: TenantAccess, rules: AccessRules) -> Caller:
    lanes = tuple(name for name in rules.lanes if not tenant.lanes or name in tenant.lanes)
    is_default_open = not tenant.lanes or rules.default_lane in tenant.lanes
    default_lane = rules.default_lane if is_default_open else tenant.lanes[0]
    lane_caps = {one.lane: one.caps for one in rules.lane_caps}
    return Caller(
        tenant.name,
        lanes,
        default_lane,
        rules.lanes,
        tenant.isolates_cache,
        caps=tenant.caps,
        lane_caps=lane_caps,
        has_peers=sum(bool(one.key_digests) for one in rules.tenants) > 1,
        requests_per_min=tenant.requests_per_min,
    )


def _tenant_salt(tenant: str, own_salt: str) -> str:
    """Longer than any salt that a request may have, so that nobody else can ask for it."""
    digest = hashlib.sha256(f"{len(tenant)}:{tenant}:{own_salt}".encode("utf-8", "surrogatepass")).hexdigest()
    return f"tenant:{digest}"

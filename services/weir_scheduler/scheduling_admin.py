"""What operators see and change of what the leading scheduler goes by (`weir.v1.Scheduling`), and who is one.

Whoever shows an admin key is an operator, and everybody where the limits hold no key.
"""

import hmac
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from weir.core.credentials import MIN_KEY_CHARS, key_digest
from weir.core.errors import FieldViolation, InvalidRequest, PermissionDenied, Unauthenticated
from weir.rpc.access import RpcCaller
from weir.runtime.change_log import HERE
from weir.scheduling.core import SchedulerCore
from weir.scheduling.limits import CoreLimits
from weir.scheduling.worker_limits import check_workers_can
from weir.wire.v1 import scheduling_pb2
from weir_scheduler.effective_limits import LimitChange
from weir_scheduler.limits_keeper import LimitsKeeper

_MAX_SETTINGS = 256
_LEASE_MS = (1_000, 600_000)
MAX_REASON_CHARS = 400


class Operators:
    """Admin keys are those of the limits, and the one that this process was given in a file of its own.

    Where the limits hold no key, of tenants or of operators, as on a laptop, none is asked for, though the process has
    its own: `weir up` gives every scheduler one. Once they do, an admin key is needed, so that no tenant can change its
    own limits.
    """

    def __init__(self, own_key: str = "") -> None:
        self.own_digests = (key_digest(own_key),) if own_key else ()
        self.num_refused = 0

    @classmethod
    def from_file(cls, path: Path) -> "Operators":
        """Raises InvalidRequest for a file that cannot be read or holds no key."""
        try:
            key = path.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise bad_field("admin_key_file", f"cannot be read: {error}") from error
        if len(key) < MIN_KEY_CHARS:
            raise bad_field(
                "admin_key_file", f"{path}: a key of {len(key)} characters, must have at least {MIN_KEY_CHARS}"
            )
        return cls(key)

    def check(self, key: str | None, limits: CoreLimits) -> None:
        """Raises Unauthenticated or PermissionDenied for who may not."""
        if not self._asks(limits):
            return
        try:
            self._check_needed(key, limits)
        except (Unauthenticated, PermissionDenied):
            self.num_refused += 1
            raise

    def actor_of(self, caller: RpcCaller, limits: CoreLimits) -> str:
        """Who calls, as the log of changes names it: never more of a key than 8 hex digits of its digest."""
        if caller.key is not None:
            digest = key_digest(caller.key)
            if any(hmac.compare_digest(digest, admin) for admin in self._digests(limits)):
                return f"key:{digest.hex()[:8]}"
            if self._asks(limits):
                shown = digest.hex()
                is_tenants = any(shown in tenant.api_key_digests for tenant in limits.tenants_by_name.values())
                return f"{'tenant' if is_tenants else 'unknown'}-key:{shown[:8]}"
        if self._asks(limits):
            return "nobody"
        return HERE if caller.is_here else caller.peer[:80]

    @staticmethod
    def _asks(limits: CoreLimits) -> bool:
        return bool(limits.has_tenant_keys or limits.admin_key_digests)

    def _digests(self, limits: CoreLimits) -> tuple[bytes, ...]:
        return (*self.own_digests, *map(bytes.fromhex, limits.admin_key_digests))

    def _check_needed(self, key: str | None, limits: CoreLimits) -> None:
        admins = self._digests(limits)
        if not admins:
            raise PermissionDenied(
                "tenants have API keys and no admin key is known: put admin_key_digests into the limits file "
                "(`weir limits key` makes one), or give the scheduler an admin_key_file"
            )
        if key is None:
            raise Unauthenticated(
                "an admin key is needed: give --admin-key or WEIR_ADMIN_KEY, or send Authorization: Bearer KEY"
            )
        digest = key_digest(key)
        if not any(hmac.compare_digest(digest, admin) for admin in admins):
            tenants = limits.tenants_by_name.values()
            if any(digest.hex() in tenant.api_key_digests for tenant in tenants):
                raise PermissionDenied("this is a tenant's key: limits and policy take one of admin_key_digests")
            raise Unauthenticated("the admin key is not known")


class SchedulingAdmin:
    """What operators may ask of one leader."""

    def __init__(self, keeper: LimitsKeeper, operators: Operators, core: SchedulerCore) -> None:
        self._keeper = keeper
        self._operators = operators
        self._core = core

    def check_operator(self, key: str | None) -> None:
        """Raises Unauthenticated or PermissionDenied unless whoever shows this key may see and change everything."""
        self._operators.check(key, self._keeper.effective_limits.limits)

    def actor_of(self, caller: RpcCaller) -> str:
        """Who that is, as the log of changes names it."""
        return self._operators.actor_of(caller, self._keeper.effective_limits.limits)

    @property
    def policy(self) -> str:
        """In force."""
        return str(self._keeper.effective_limits.policy)

    def describe(self) -> scheduling_pb2.DescribeSchedulingResponse:
        """Everything that is in force, with its live numbers."""
        effective_limits = self._keeper.effective_limits
        lanes, tenants = self._core.lane_metrics(), self._tenant_metrics()
        return scheduling_pb2.DescribeSchedulingResponse(
            epoch=self._core.epoch,
            policy=str(effective_limits.policy),
            limits_toml=effective_limits.toml,
            limits_path=str(self._keeper.limits_path or ""),
            limits_digest=effective_limits.file_digest,
            limits_error=self._keeper.file_error,
            overrides=_settings(effective_limits.overrides),
            tuned=_settings(effective_limits.tuned.kept),
            trial=_settings(effective_limits.tuned.trial),
            lanes=[
                scheduling_pb2.LaneDescription(name=lane.name, metrics=lanes.get(lane.name, {}))
                for lane in effective_limits.limits.lanes
            ],
            tenants=[
                scheduling_pb2.TenantDescription(name=name, metrics=tenants.get(name, {}))
                for name in sorted(effective_limits.limits.tenants_by_name)
            ],
        )

    def _tenant_metrics(self) -> dict[str, dict[str, float]]:
        """With the virtual token counter of each lane, over all models: who has the least of a lane is served next."""
        tenants = {name: dict(metrics) for name, metrics in self._core.tenant_metrics().items()}
        for (_, lane), counters in self._core.tenant_counters().items():
            for tenant, value in counters.items():
                metrics = tenants.setdefault(tenant, {})
                name = f"virtual_tokens_{lane}"
                metrics[name] = metrics.get(name, 0.0) + value
        return tenants

    async def set_limits(self, request: scheduling_pb2.SetLimitsRequest) -> scheduling_pb2.SetLimitsResponse:
        """Raises InvalidRequest, and changes nothing then."""
        changes = _changes_of(request.settings)
        changed = await self._keeper.set_limits(changes, self._check_of(changes))
        return scheduling_pb2.SetLimitsResponse(
            limits_toml=self._keeper.effective_limits.toml, changes=map(_change_pb, changed)
        )

    async def tune_limits(self, request: scheduling_pb2.TuneLimitsRequest) -> scheduling_pb2.TuneLimitsResponse:
        """Raises InvalidRequest, and changes nothing then."""
        if len(request.reason) > MAX_REASON_CHARS or not request.reason.isprintable():
            raise bad_field("reason", f"must be at most {MAX_REASON_CHARS} printable characters")
        match request.deed:
            case scheduling_pb2.TUNING_DEED_TRY | scheduling_pb2.TUNING_DEED_KEEP:
                changed = await self._tune(request, is_trial=request.deed == scheduling_pb2.TUNING_DEED_TRY)
            case scheduling_pb2.TUNING_DEED_END:
                changed = await self._keeper.tune((), lambda limits: None)
            case scheduling_pb2.TUNING_DEED_REVERT:
                changed = await self._keeper.forget_tuned()
            case _:
                raise bad_field("deed", "must be to try, keep, end or revert")
        return scheduling_pb2.TuneLimitsResponse(changes=map(_change_pb, changed))

    async def _tune(self, request: scheduling_pb2.TuneLimitsRequest, *, is_trial: bool) -> tuple[LimitChange, ...]:
        low_ms, high_ms = _LEASE_MS if is_trial else (0, 0)
        if not low_ms <= request.lease_ms <= high_ms:
            raise bad_field("lease_ms", f"is {request.lease_ms}; must be from {low_ms} to {high_ms}")
        changes = _changes_of(request.settings)
        return await self._keeper.tune(changes, self._check_of(changes), request.lease_ms / 1e3)

    def _check_of(self, changes: Sequence[tuple[str, str]]) -> Callable[[CoreLimits], None]:
        def check(limits: CoreLimits) -> None:
            check_workers_can([key for key, _ in changes], limits.workers, self._core.worker_records())

        return check

    async def set_policy(self, request: scheduling_pb2.SetPolicyRequest) -> scheduling_pb2.SetPolicyResponse:
        """Raises InvalidRequest, and changes nothing then."""
        try:
            await self._keeper.set_policy(request.policy)
        except ValueError as error:
            raise bad_field("policy", str(error)) from error
        return scheduling_pb2.SetPolicyResponse(policy=str(self._keeper.effective_limits.policy))


def _changes_of(settings: Sequence[scheduling_pb2.LimitSetting]) -> list[tuple[str, str]]:
    """Raises InvalidRequest for none, too many, or one twice."""
    if not 1 <= len(settings) <= _MAX_SETTINGS:
        raise bad_field("settings", f"are {len(settings)}; give from 1 to {_MAX_SETTINGS}")
    keys = [setting.key for setting in settings]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise bad_field(twice[:100], "comes twice; give each key once")
    return [(setting.key, setting.value) for setting in settings]


def _settings(values: Mapping[str, str]) -> list[scheduling_pb2.LimitSetting]:
    return [scheduling_pb2.LimitSetting(key=key, value=value) for key, value in values.items()]


def _change_pb(change: LimitChange) -> scheduling_pb2.LimitChange:
    return scheduling_pb2.LimitChange(key=change.key, was=change.was, now=change.now)


def bad_field(field: str, description: str) -> InvalidRequest:
    """One wrong field of an operator's call."""
    return InvalidRequest([FieldViolation(field, description)])

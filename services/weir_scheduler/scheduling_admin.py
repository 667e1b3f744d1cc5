"""Where operators see and change what the leading scheduler goes by (`weir.v1.Scheduling`), and who is one.

Whoever shows an admin key is an operator, and everybody where nobody has a key.
"""

import hmac
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc.aio

from weir.core.credentials import MIN_KEY_CHARS, key_digest, try_read_key
from weir.core.errors import FieldViolation, InvalidRequest, PermissionDenied, Unauthenticated, Unavailable
from weir.scheduling.core import SchedulerCore
from weir.scheduling.limits import CoreLimits
from weir.scheduling.worker_limits import check_workers_can
from weir.wire.v1 import admin_pb2, scheduling_pb2, scheduling_pb2_grpc
from weir_scheduler.limits_keeper import LimitsKeeper

_STANDBY_RETRY_S = 1.0
_MAX_SETTINGS = 256

_Context = grpc.aio.ServicerContext[Any, Any]


class Operators:
    """Admin keys are those of the limits, and the one that this process was given in a file of its own.

    A stack without any keys, as on a laptop, asks for none. Once tenants have keys, an admin key is needed, so that no
    tenant can change its own limits.
    """

    def __init__(self, own_key: str = "") -> None:
        self._own_digests = (key_digest(own_key),) if own_key else ()
        self.num_refused = 0

    @classmethod
    def from_file(cls, path: Path) -> "Operators":
        """Raises InvalidRequest for a file that cannot be read or holds no key."""
        try:
            key = path.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise _bad("admin_key_file", f"cannot be read: {error}") from error
        if len(key) < MIN_KEY_CHARS:
            raise _bad("admin_key_file", f"{path}: a key of {len(key)} characters, must have at least {MIN_KEY_CHARS}")
        return cls(key)

    @property
    def has_own_key(self) -> bool:
        return bool(self._own_digests)

    def check(self, key: str | None, limits: CoreLimits) -> None:
        """Raises Unauthenticated or PermissionDenied for who may not."""
        if not (limits.has_tenant_keys or limits.admin_key_digests):
            return
        try:
            self._check_needed(key, limits)
        except (Unauthenticated, PermissionDenied):
            self.num_refused += 1
            raise

    def _check_needed(self, key: str | None, limits: CoreLimits) -> None:
        admins = (*self._own_digests, *map(bytes.fromhex, limits.admin_key_digests))
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
            overrides=[
                scheduling_pb2.LimitSetting(key=key, value=value) for key, value in effective_limits.overrides.items()
            ],
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
        changes = [(setting.key, setting.value) for setting in request.settings]
        if not 1 <= len(changes) <= _MAX_SETTINGS:
            raise _bad("settings", f"are {len(changes)}; give from 1 to {_MAX_SETTINGS}")
        keys = [key for key, _ in changes]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise _bad(twice[:100], "comes twice; give each key once")

        def check(limits: CoreLimits) -> None:
            check_workers_can(keys, limits.workers, self._core.worker_records())

        changed = await self._keeper.set_limits(changes, check)
        return scheduling_pb2.SetLimitsResponse(
            limits_toml=self._keeper.effective_limits.toml,
            changes=[scheduling_pb2.LimitChange(key=one.key, was=one.was, now=one.now) for one in changed],
        )

    async def set_policy(self, request: scheduling_pb2.SetPolicyRequest) -> scheduling_pb2.SetPolicyResponse:
        """Raises InvalidRequest, and changes nothing then."""
        try:
            await self._keeper.set_policy(request.policy)
        except ValueError as error:
            raise _bad("policy", str(error)) from error
        return scheduling_pb2.SetPolicyResponse(policy=str(self._keeper.effective_limits.policy))


class SchedulingServicer(scheduling_pb2_grpc.SchedulingServicer):
    """`try_admin` gives nothing while this scheduler does not lead."""

    def __init__(self, try_admin: Callable[[], SchedulingAdmin | None]) -> None:
        self._try_admin = try_admin

    async def set_limits(
        self, request: admin_pb2.AdminSetLimitsRequest, context: _Context
    ) -> admin_pb2.AdminSetLimitsResponse:
        """`Admin/SetLimits`."""
        answer = await self.SetLimits(scheduling_pb2.SetLimitsRequest(settings=request.settings), context)
        return admin_pb2.AdminSetLimitsResponse(changes=answer.changes)

    async def DescribeScheduling(  # noqa: N802 - the method's name on the wire
        self, request: scheduling_pb2.DescribeSchedulingRequest, context: _Context
    ) -> scheduling_pb2.DescribeSchedulingResponse:
        del request
        return self._admin(context).describe()

    async def SetLimits(  # noqa: N802 - the method's name on the wire
        self, request: scheduling_pb2.SetLimitsRequest, context: _Context
    ) -> scheduling_pb2.SetLimitsResponse:
        return await self._admin(context).set_limits(request)

    async def SetPolicy(  # noqa: N802 - the method's name on the wire
        self, request: scheduling_pb2.SetPolicyRequest, context: _Context
    ) -> scheduling_pb2.SetPolicyResponse:
        return await self._admin(context).set_policy(request)

    def _admin(self, context: _Context) -> SchedulingAdmin:
        """For whoever calls. Raises Unauthenticated, PermissionDenied or Unavailable."""
        admin = self._try_admin()
        if admin is None:
            raise Unavailable("this scheduler stands by; ask the one that leads", retry_after_s=_STANDBY_RETRY_S)
        admin.check_operator(shown_key(context))
        return admin


def shown_key(context: _Context) -> str | None:
    """The key of whoever calls."""
    headers = {name: value for name, value in context.invocation_metadata() or () if isinstance(value, str)}
    return try_read_key(headers.get("authorization", ""), headers.get("x-api-key", ""))


def _bad(field: str, description: str) -> InvalidRequest:
    return InvalidRequest([FieldViolation(field, description)])

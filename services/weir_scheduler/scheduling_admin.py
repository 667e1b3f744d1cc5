"""Where operators see and change what the leading scheduler goes by: `weir.v1.Scheduling`."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import grpc.aio

from weir.core.api_key import try_read_key
from weir.core.errors import FieldViolation, InvalidRequest, Unavailable
from weir.scheduling.accounting.fairness import GroupKey
from weir.wire.v1 import scheduling_pb2, scheduling_pb2_grpc
from weir_scheduler.limits_keeper import LimitsKeeper
from weir_scheduler.operators import Operators

_STANDBY_RETRY_S = 1.0
_MAX_SETTINGS = 256

_Context = grpc.aio.ServicerContext[Any, Any]
_Figures = Mapping[str, Mapping[str, float]]


class MetricsSource(Protocol):
    """The live numbers of a core, by name of lane or tenant."""

    def lane_metrics(self) -> _Figures: ...

    def tenant_metrics(self) -> _Figures: ...

    def tenant_counters(self) -> Mapping[GroupKey, Mapping[str, float]]:
        """(model, lane) -> tenant -> virtual token counter."""
        ...


class SchedulingAdmin:
    """Of one leader."""

    def __init__(self, rules: LimitsKeeper, operators: Operators, metrics: MetricsSource, epoch: int) -> None:
        self._rules = rules
        self._operators = operators
        self._metrics = metrics
        self._epoch = epoch

    def check_operator(self, key: str | None) -> None:
        """Raises Unauthenticated or PermissionDenied unless whoever shows this key may see and change everything."""
        self._operators.check(key, self._rules.effective_limits.limits)

    def describe(self) -> scheduling_pb2.DescribeSchedulingResponse:
        """Everything that is in force, with its live numbers."""
        effective_limits = self._rules.effective_limits
        lanes, tenants = self._metrics.lane_metrics(), self._tenant_metrics()
        return scheduling_pb2.DescribeSchedulingResponse(
            epoch=self._epoch,
            policy=str(effective_limits.policy),
            limits_toml=effective_limits.toml,
            limits_path=str(self._rules.limits_path or ""),
            limits_digest=effective_limits.file_digest,
            limits_error=self._rules.file_error,
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
        tenants = {name: dict(metrics) for name, metrics in self._metrics.tenant_metrics().items()}
        for (_, lane), counters in self._metrics.tenant_counters().items():
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
        await self._rules.set_limits(changes)
        return scheduling_pb2.SetLimitsResponse(limits_toml=self._rules.effective_limits.toml)

    async def set_policy(self, request: scheduling_pb2.SetPolicyRequest) -> scheduling_pb2.SetPolicyResponse:
        """Raises InvalidRequest, and changes nothing then."""
        try:
            await self._rules.set_policy(request.policy)
        except ValueError as error:
            raise _bad("policy", str(error)) from error
        return scheduling_pb2.SetPolicyResponse(policy=str(self._rules.effective_limits.policy))


class SchedulingServicer(scheduling_pb2_grpc.SchedulingServicer):
    """`try_admin` gives nothing while this scheduler does not lead."""

    def __init__(self, try_admin: Callable[[], SchedulingAdmin | None]) -> None:
        self._try_admin = try_admin

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
        headers = {name: value for name, value in context.invocation_metadata() or () if isinstance(value, str)}
        admin.check_operator(try_read_key(headers.get("authorization", ""), headers.get("x-api-key", "")))
        return admin


def _bad(field: str, description: str) -> InvalidRequest:
    return InvalidRequest([FieldViolation(field, description)])

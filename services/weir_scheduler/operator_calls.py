"""The calls of operators as they come over gRPC: who may, and whether this scheduler is the one to ask."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc.aio

from weir.rpc.access import RpcCaller, shown_key
from weir.runtime.admin import Context
from weir.wire.v1 import admin_pb2, scheduling_pb2, scheduling_pb2_grpc
from weir_scheduler.scheduling_admin import SchedulingAdmin
from weir_scheduler.worker_admin import WorkerAdmin

_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class LeaderAdmins:
    """What operators may ask of one leader."""

    scheduling: SchedulingAdmin
    workers: WorkerAdmin


class OperatorGate:
    """Every call of an operator passes here."""

    def __init__(self, leader_admins: Callable[[], LeaderAdmins]) -> None:
        """`leader_admins` raises Unavailable while this scheduler does not lead."""
        self._leader_admins = leader_admins

    def check(self, caller: RpcCaller) -> None:
        """For the door of the port. Raises as `admit`."""
        self._leader_admins().scheduling.check_operator(caller.key)

    def admit(self, context: _Context) -> LeaderAdmins:
        """For whoever calls. Raises Unauthenticated, PermissionDenied or Unavailable."""
        admins = self._leader_admins()
        admins.scheduling.check_operator(shown_key(context))
        return admins


class SchedulingServicer(scheduling_pb2_grpc.SchedulingServicer):
    """`weir.v1.Scheduling`."""

    def __init__(self, gate: OperatorGate) -> None:
        self._gate = gate

    async def DescribeScheduling(  # noqa: N802 - the method's name on the wire
        self, request: scheduling_pb2.DescribeSchedulingRequest, context: _Context
    ) -> scheduling_pb2.DescribeSchedulingResponse:
        del request
        return self._gate.admit(context).scheduling.describe()

    async def SetLimits(  # noqa: N802 - the method's name on the wire
        self, request: scheduling_pb2.SetLimitsRequest, context: _Context
    ) -> scheduling_pb2.SetLimitsResponse:
        return await self._gate.admit(context).scheduling.set_limits(request)

    async def SetPolicy(  # noqa: N802 - the method's name on the wire
        self, request: scheduling_pb2.SetPolicyRequest, context: _Context
    ) -> scheduling_pb2.SetPolicyResponse:
        return await self._gate.admit(context).scheduling.set_policy(request)


class WorkerOperations:
    """Implements `weir.runtime.admin.Operations`."""

    def __init__(self, gate: OperatorGate) -> None:
        self._gate = gate

    async def list_workers(self, context: Context) -> admin_pb2.ListWorkersResponse:
        return self._gate.admit(context).workers.list_workers()

    async def drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:
        return await self._gate.admit(context).workers.drain(request)

    async def end_drain(self, request: admin_pb2.EndDrainRequest, context: Context) -> admin_pb2.EndDrainResponse:
        return await self._gate.admit(context).workers.end_drain(request)

    async def set_role(self, request: admin_pb2.SetRoleRequest, context: Context) -> admin_pb2.SetRoleResponse:
        return await self._gate.admit(context).workers.set_role(request)

    async def set_limits(
        self, request: admin_pb2.AdminSetLimitsRequest, context: Context
    ) -> admin_pb2.AdminSetLimitsResponse:
        same = scheduling_pb2.SetLimitsRequest(settings=request.settings)
        answer = await self._gate.admit(context).scheduling.set_limits(same)
        return admin_pb2.AdminSetLimitsResponse(changes=answer.changes)

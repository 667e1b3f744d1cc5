"""The calls of operators as they come over gRPC: who may, and whether this scheduler is the one to ask."""

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc.aio
from opentelemetry import trace

from weir.core.errors import PermissionDenied, Unauthenticated, WeirError
from weir.core.trace_context import extract
from weir.rpc.access import RpcCaller
from weir.runtime.admin import Context
from weir.runtime.change_log import ChangeLog, Told, new_correlation_id
from weir.wire.v1 import admin_pb2, scheduling_pb2, scheduling_pb2_grpc
from weir_scheduler.scheduling_admin import SchedulingAdmin
from weir_scheduler.worker_admin import WorkerAdmin

_Context = grpc.aio.ServicerContext[Any, Any]
_AnswerT = TypeVar("_AnswerT")
_MAX_REFUSED_OBJECTS = 16
_TUNING_ACTIONS: Mapping[int, str] = {
    scheduling_pb2.TUNING_DEED_TRY: "try limits",
    scheduling_pb2.TUNING_DEED_KEEP: "keep limits",
    scheduling_pb2.TUNING_DEED_END: "end trial",
    scheduling_pb2.TUNING_DEED_REVERT: "revert tuned limits",
}
_CORRELATION_ID = re.compile(r"[A-Za-z0-9._-]{1,36}")


@dataclass(frozen=True, slots=True)
class LeaderAdmins:
    """What operators may ask of one leader."""

    scheduling: SchedulingAdmin
    workers: WorkerAdmin


class OperatorGate:
    """Every call of an operator passes here, and `changes` hears of each one that changes something, or is denied."""

    def __init__(self, leader_admins: Callable[[], LeaderAdmins], changes: ChangeLog | None = None) -> None:
        """`leader_admins` raises Unavailable while this scheduler does not lead."""
        self._leader_admins = leader_admins
        self._changes = changes or ChangeLog(None, "scheduler")

    def check(self, caller: RpcCaller) -> None:
        """For the door of the port. Raises as `admit`."""
        self._admit(caller, "call", [caller.method])

    def admit(self, context: _Context, method: str) -> LeaderAdmins:
        """For whoever calls. Raises Unauthenticated, PermissionDenied or Unavailable."""
        return self._admit(RpcCaller.of(method, context), "call", [method])

    async def change(
        self,
        context: _Context,
        action: str,
        objects: Sequence[str],
        work: Callable[[LeaderAdmins], Awaitable[_AnswerT]],
        tell: Callable[[_AnswerT], Iterable[Told]],
    ) -> _AnswerT:
        """The answer of `work`. `objects`: what the call would change; `tell`: what it changed. Raises WeirError."""
        caller = RpcCaller.of(action, context)
        admins = self._admit(caller, action, objects)
        actor, correlation_id = admins.scheduling.actor_of(caller), _correlation_of(context)
        try:
            answer = await work(admins)
        except WeirError as error:
            self._changes.write_failure(actor, action, objects, error, correlation_id)
            raise
        self._changes.write_all(actor, action, tell(answer), correlation_id)
        return answer

    def _admit(self, caller: RpcCaller, action: str, objects: Sequence[str]) -> LeaderAdmins:
        admins = self._leader_admins()
        try:
            admins.scheduling.check_operator(caller.key)
        except (Unauthenticated, PermissionDenied) as error:
            actor = admins.scheduling.actor_of(caller)
            self._changes.write_failure(actor, action, objects, error, new_correlation_id())
            raise
        return admins


class SchedulingServicer(scheduling_pb2_grpc.SchedulingServicer):
    """`weir.v1.Scheduling`."""

    def __init__(self, gate: OperatorGate) -> None:
        self._gate = gate

    async def DescribeScheduling(  # noqa: N802 - the method's name on the wire
        self, request: scheduling_pb2.DescribeSchedulingRequest, context: _Context
    ) -> scheduling_pb2.DescribeSchedulingResponse:
        del request
        return self._gate.admit(context, "DescribeScheduling").scheduling.describe()

    async def SetLimits(  # noqa: N802 - the method's name on the wire
        self, request: scheduling_pb2.SetLimitsRequest, context: _Context
    ) -> scheduling_pb2.SetLimitsResponse:
        return await _set_limits(self._gate, request, context)

    async def TuneLimits(  # noqa: N802 - the method's name on the wire
        self, request: scheduling_pb2.TuneLimitsRequest, context: _Context
    ) -> scheduling_pb2.TuneLimitsResponse:
        def tell(answer: scheduling_pb2.TuneLimitsResponse) -> Iterable[Told]:
            return (Told(one.key, one.was, one.now, request.reason) for one in answer.changes)

        action = _TUNING_ACTIONS.get(request.deed, "tune")
        objects = [setting.key for setting in request.settings[:_MAX_REFUSED_OBJECTS]] or ["workers"]
        return await self._gate.change(
            context, action, objects, lambda admins: admins.scheduling.tune_limits(request), tell
        )

    async def SetPolicy(  # noqa: N802 - the method's name on the wire
        self, request: scheduling_pb2.SetPolicyRequest, context: _Context
    ) -> scheduling_pb2.SetPolicyResponse:
        before: list[str] = []

        def work(admins: LeaderAdmins) -> Awaitable[scheduling_pb2.SetPolicyResponse]:
            before.append(admins.scheduling.policy)
            return admins.scheduling.set_policy(request)

        def tell(answer: scheduling_pb2.SetPolicyResponse) -> Iterable[Told]:
            yield Told("policy", before[0], answer.policy)

        return await self._gate.change(context, "set policy", ["policy"], work, tell)


class WorkerOperations:
    """Implements `weir.runtime.admin.Operations`."""

    def __init__(self, gate: OperatorGate) -> None:
        self._gate = gate

    async def list_workers(self, context: Context) -> admin_pb2.ListWorkersResponse:
        return self._gate.admit(context, "ListWorkers").workers.list_workers()

    async def drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:
        def tell(answer: admin_pb2.DrainResponse) -> Iterable[Told]:
            forced, spare = ", forced" if request.force else "", ", as a spare" if request.as_spare else ""
            after = f"draining within {request.grace_ms} ms{forced}{spare}"
            yield Told(request.worker_id, _duty_name(answer.worker.duty), after)

        objects = [request.worker_id]
        return await self._gate.change(context, "drain", objects, lambda admins: admins.workers.drain(request), tell)

    async def end_drain(self, request: admin_pb2.EndDrainRequest, context: Context) -> admin_pb2.EndDrainResponse:
        def tell(answer: admin_pb2.EndDrainResponse) -> Iterable[Told]:
            yield Told(request.worker_id, _duty_name(answer.worker.duty), "serving")

        return await self._gate.change(
            context, "end drain", [request.worker_id], lambda admins: admins.workers.end_drain(request), tell
        )

    async def set_role(self, request: admin_pb2.SetRoleRequest, context: Context) -> admin_pb2.SetRoleResponse:
        def tell(answer: admin_pb2.SetRoleResponse) -> Iterable[Told]:
            yield Told(request.worker_id, answer.worker.role, f"{request.role} as {answer.new_worker_id}")

        return await self._gate.change(
            context, "set role", [request.worker_id], lambda admins: admins.workers.set_role(request), tell
        )

    async def set_limits(
        self, request: admin_pb2.AdminSetLimitsRequest, context: Context
    ) -> admin_pb2.AdminSetLimitsResponse:
        same = scheduling_pb2.SetLimitsRequest(settings=request.settings)
        answer = await _set_limits(self._gate, same, context)
        return admin_pb2.AdminSetLimitsResponse(changes=answer.changes)


async def _set_limits(
    gate: OperatorGate, request: scheduling_pb2.SetLimitsRequest, context: _Context
) -> scheduling_pb2.SetLimitsResponse:
    def tell(answer: scheduling_pb2.SetLimitsResponse) -> Iterable[Told]:
        return (Told(one.key, one.was, one.now) for one in answer.changes)

    objects = [setting.key for setting in request.settings[:_MAX_REFUSED_OBJECTS]]
    return await gate.change(context, "set limits", objects, lambda admins: admins.scheduling.set_limits(request), tell)


def _duty_name(duty: "admin_pb2.WorkerDuty.ValueType") -> str:
    return admin_pb2.WorkerDuty.Name(duty).removeprefix("WORKER_DUTY_").lower()


def _correlation_of(context: _Context) -> str:
    """The call's x-request-id; else of the trace that it belongs to; else a new one."""
    headers = {name: value for name, value in context.invocation_metadata() or () if isinstance(value, str)}
    given = headers.get("x-request-id", "")
    if _CORRELATION_ID.fullmatch(given):
        return given
    span = trace.get_current_span(extract(headers)).get_span_context()
    return trace.format_trace_id(span.trace_id) if span.is_valid else new_correlation_id()

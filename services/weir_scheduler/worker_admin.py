"""What operators have workers do, through the leading scheduler: it knows who the operators are, and what each
worker is needed for. The worker itself is told over the bus."""

from typing import TYPE_CHECKING

from weir.bus.endpoint import BusEndpoint
from weir.bus.messages import SetDrain, SetRole, WorkerAnswer, WorkerRecord
from weir.bus.protocol import BusError
from weir.bus.subjects import Subjects
from weir.core.errors import NotFound, Unavailable
from weir.core.roles import WORKER_ROLES
from weir.scheduling.core import SchedulerCore
from weir.wire.v1 import admin_pb2
from weir_scheduler.scheduling_admin import bad_field

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_RETRY_S = 1.0
_ANSWER_TIMEOUT_S = 3.0
_MAX_GRACE_MS = 3_600_000


class WorkerAdmin:
    """Of one leader."""

    def __init__(self, core: SchedulerCore, endpoint: BusEndpoint, subjects: Subjects) -> None:
        self._core = core
        self._endpoint = endpoint
        self._subjects = subjects

    def list_workers(self) -> admin_pb2.ListWorkersResponse:
        described = [_describe(record, is_heard=is_heard) for record, is_heard in self._core.workers.all()]
        return admin_pb2.ListWorkersResponse(workers=described)

    async def drain(self, request: admin_pb2.DrainRequest) -> admin_pb2.DrainResponse:
        """Raises InvalidRequest, NotFound, Unavailable."""
        worker = self._find(request.worker_id)
        _check_grace(request.grace_ms)
        self._check_spared(request.worker_id, force=request.force)
        command = SetDrain(self._core.epoch, is_draining=True, grace_ms=request.grace_ms, is_spare=request.as_spare)
        await self._tell(self._subjects.drain(request.worker_id), command, request.worker_id)
        return admin_pb2.DrainResponse(worker=worker)

    async def end_drain(self, request: admin_pb2.EndDrainRequest) -> admin_pb2.EndDrainResponse:
        """Raises NotFound, Unavailable."""
        worker = self._find(request.worker_id)
        command = SetDrain(self._core.epoch, is_draining=False)
        await self._tell(self._subjects.drain(request.worker_id), command, request.worker_id)
        return admin_pb2.EndDrainResponse(worker=worker)

    async def set_role(self, request: admin_pb2.SetRoleRequest) -> admin_pb2.SetRoleResponse:
        """Raises InvalidRequest, NotFound, Unavailable."""
        worker = self._find(request.worker_id)
        _check_grace(request.grace_ms)
        if request.role not in WORKER_ROLES:
            raise bad_field("role", f"{request.role[:32]!r}: must be {' or '.join(WORKER_ROLES)}")
        if worker.role == request.role:
            return admin_pb2.SetRoleResponse(worker=worker, new_worker_id=worker.worker_id)
        self._check_spared(request.worker_id, force=request.force)
        command = SetRole(self._core.epoch, request.role, request.grace_ms)
        answer = await self._tell(self._subjects.role(request.worker_id), command, request.worker_id)
        return admin_pb2.SetRoleResponse(worker=worker, new_worker_id=answer.worker_id)

    def _find(self, worker_id: str) -> admin_pb2.WorkerDescription:
        found = self._core.workers.find(worker_id)
        if found is None:
            known = ", ".join(record.worker_id for record, _ in self._core.workers.all()) or "none"
            raise NotFound("worker_id", f"there is no worker {worker_id[:100]!r}; there are: {known}")
        return _describe(found[0], is_heard=found[1])

    def _check_spared(self, worker_id: str, *, force: bool) -> None:
        if not force and not self._core.workers.can_spare(worker_id):
            problem = f"without {worker_id} no worker serves its model: streams and requests would wait"
            raise bad_field("force", f"{problem}; start another one first, or drain it all the same with force")

    async def _tell(self, subject: str, command: "DataclassInstance", worker_id: str) -> WorkerAnswer:
        try:
            answer = await self._endpoint.ask(subject, command, WorkerAnswer, timeout_s=_ANSWER_TIMEOUT_S)
        except BusError as error:
            message = f"worker {worker_id} does not answer ({error}); what it was told may have been done: ask again"
            raise Unavailable(message, retry_after_s=_RETRY_S) from error
        if answer.refusal:
            raise bad_field("worker_id", f"{worker_id} refuses: {answer.refusal}")
        return answer


def _describe(record: WorkerRecord, *, is_heard: bool) -> admin_pb2.WorkerDescription:
    return admin_pb2.WorkerDescription(
        worker_id=record.worker_id,
        role=record.role,
        model=record.model,
        address=record.address,
        host_id=record.host_id,
        duty=_duty_of(record) if is_heard else admin_pb2.WORKER_DUTY_SILENT,
        num_live=record.num_live,
        is_spare=record.is_spare,
    )


def _duty_of(record: WorkerRecord) -> "admin_pb2.WorkerDuty.ValueType":
    if record.is_drained:
        return admin_pb2.WORKER_DUTY_DRAINED
    return admin_pb2.WORKER_DUTY_DRAINING if record.is_draining else admin_pb2.WORKER_DUTY_SERVING


def _check_grace(grace_ms: int) -> None:
    if grace_ms > _MAX_GRACE_MS:
        raise bad_field("grace_ms", f"{grace_ms}: must be at most {_MAX_GRACE_MS}")

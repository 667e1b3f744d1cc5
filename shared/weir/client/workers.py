"""The client of those who drain workers and change their roles."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

from weir.client.leader import LeaderCalls
from weir.rpc.tls.certificates import Certificate
from weir.wire.v1 import admin_pb2, admin_pb2_grpc

Duty = Literal["unknown", "serving", "draining", "drained", "silent"]
_DUTIES: dict[int, Duty] = {
    admin_pb2.WORKER_DUTY_SERVING: "serving",
    admin_pb2.WORKER_DUTY_DRAINING: "draining",
    admin_pb2.WORKER_DUTY_DRAINED: "drained",
    admin_pb2.WORKER_DUTY_SILENT: "silent",
}


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as the leading scheduler hears of it. `num_live`: sequences that it has or is to get."""

    worker_id: str
    role: str
    model: str
    address: str
    host_id: str
    duty: Duty
    num_live: int
    is_spare: bool = False
    """Drained to be there when more workers are wanted."""

    @classmethod
    def from_pb(cls, worker: admin_pb2.WorkerDescription) -> "WorkerView":
        return cls(
            worker.worker_id,
            worker.role,
            worker.model,
            worker.address,
            worker.host_id,
            _DUTIES.get(worker.duty, "unknown"),
            worker.num_live,
            worker.is_spare,
        )


class WorkersClient:
    """Talks to whichever of the schedulers leads. Every method raises an error of `weir.core.errors`."""

    def __init__(
        self, addresses: Sequence[str], *, admin_key: str = "", certificate: Certificate | None = None
    ) -> None:
        """As `weir.client.scheduling.SchedulingClient`."""
        self._calls = LeaderCalls(addresses, admin_key, certificate)

    def list(self) -> list[WorkerView]:
        """All that are known, by id."""
        answer: admin_pb2.ListWorkersResponse = self._ask("ListWorkers", admin_pb2.ListWorkersRequest())
        return [WorkerView.from_pb(worker) for worker in answer.workers]

    def drain(self, worker_id: str, *, grace_s: float, force: bool = False, as_spare: bool = False) -> WorkerView:
        """Begins; `list` shows how far it has come. Returns the worker as it was."""
        grace_ms = round(grace_s * 1e3)
        request = admin_pb2.DrainRequest(worker_id=worker_id, grace_ms=grace_ms, force=force, as_spare=as_spare)
        answer: admin_pb2.DrainResponse = self._ask("Drain", request)
        return WorkerView.from_pb(answer.worker)

    def end_drain(self, worker_id: str) -> WorkerView:
        """It takes work again. Returns the worker as it was."""
        answer: admin_pb2.EndDrainResponse = self._ask("EndDrain", admin_pb2.EndDrainRequest(worker_id=worker_id))
        return WorkerView.from_pb(answer.worker)

    def set_role(self, worker_id: str, role: str, *, grace_s: float, force: bool = False) -> str:
        """Begins; returns the id under which `list` shows it in that role, `worker_id` if it has it already."""
        request = admin_pb2.SetRoleRequest(worker_id=worker_id, role=role, grace_ms=round(grace_s * 1e3), force=force)
        answer: admin_pb2.SetRoleResponse = self._ask("SetRole", request)
        return answer.new_worker_id

    def close(self) -> None:
        self._calls.close()

    def __enter__(self) -> "WorkersClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, method: str, request: object) -> Any:
        return self._calls.ask(admin_pb2_grpc.AdminStub, method, request)

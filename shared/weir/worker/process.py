"""The process of a worker: in one role at a time, and what operators have it do.

SetRole ──> drain ──> stop (lease and registry entry go) ──> another shell over the same weights ──> start
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc.aio

from weir.bus.endpoint import BusEndpoint
from weir.bus.messages import SetDrain, SetRole, WorkerAnswer
from weir.bus.protocol import Bus, BusError
from weir.bus.subjects import Subjects
from weir.core.errors import Unavailable
from weir.core.roles import WORKER_ROLES
from weir.runtime.admin import Description
from weir.runtime.config import ConfigError
from weir.runtime.service import ServiceContext
from weir.wire.v1 import worker_pb2, worker_pb2_grpc
from weir.worker.requests.drain import Duty
from weir.worker.shell import WorkerShell
from weir.worker.tasks import WorkerTasks

_log = logging.getLogger(__name__)
_MAX_GRACE_S = 3600.0
_RETRY_AFTER_S = 1.0
_LAST_FRAMES_S = 1.0
_SWITCH_STOP_S = 3.0
_CLOSE_TIMEOUT_S = 2.0


class WorkerProcess:
    """Implements `weir.runtime.service.Component`: a shell that can be exchanged for one of another role.

    A change that fails ends the process: what starts it again starts it in the role that it is configured for.
    """

    def __init__(
        self,
        context: ServiceContext[Any],
        prepare: Callable[[str, str], Callable[[], WorkerShell]],
        connect_bus: Callable[[str], Awaitable[Bus]],
    ) -> None:
        """`prepare` of a role and a worker id checks the configuration for that role, raising ConfigError, and returns
        what makes the shell. `connect_bus` raises BusError."""
        self._context = context
        self._prepare = prepare
        self._connect_bus = connect_bus
        self._subjects = Subjects(context.config.instance)
        self._role, self._worker_id = context.role, context.process_id
        self._shell = prepare(self._role, self._worker_id)()
        self._next: tuple[str, str] | None = None
        """Role and id that it is about to have."""
        self._bus: Bus | None = None
        self._endpoint: BusEndpoint | None = None
        self._epoch = 0
        self._num_switches = 0
        self._tasks = WorkerTasks(context.request_shutdown)
        self._is_between = False
        """Between two shells."""
        servicer = _PresentServicer(lambda: None if self._is_between else self._shell)
        worker_pb2_grpc.add_WorkerServicer_to_server(servicer, context.grpc_server)

    async def start(self) -> None:
        await self._shell.start(is_spare=self._context.config.is_spare)
        try:
            self._bus = await self._connect_bus(f"{self._worker_id} operators")
            await self._listen()
        except BusError as error:
            raise Unavailable(str(error)) from error

    async def drain(self, deadline_s: float) -> None:
        """A change of role that is under way is hastened, and waited for within the time that there is."""
        ends_at_s = asyncio.get_running_loop().time() + deadline_s
        if self._next is not None:
            self._shell.begin_drain(0.0)
            await self._tasks.stop(min(_SWITCH_STOP_S, deadline_s))
        await self._shell.drain(max(0.0, ends_at_s - asyncio.get_running_loop().time()))

    async def stop(self) -> None:
        await self._tasks.stop()
        if self._endpoint is not None:
            await self._endpoint.close()
        await self._shell.stop()
        if self._bus is None:
            return
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._bus.close()
        except TimeoutError:
            _log.info("the operators' connection to the bus did not close in time")

    def describe(self) -> Description:
        described = self._shell.describe()
        own = {"role_changes_total": float(self._num_switches), "is_changing_role": float(self._next is not None)}
        return replace(described, metrics={**described.metrics, **own}, role=self._role)

    # What operators ask.

    async def on_drain(self, command: SetDrain) -> WorkerAnswer:
        refusal = self._try_refuse(command.epoch, command.grace_ms)
        if not refusal and self._next is not None:
            refusal = f"it is changing its role to {self._next[0]}"
        if refusal:
            return WorkerAnswer(self._worker_id, refusal)
        if command.is_draining:
            self._shell.begin_drain(command.grace_ms / 1e3, is_spare=command.is_spare)
        else:
            self._shell.end_drain()
        return WorkerAnswer(self._worker_id)

    async def on_role(self, command: SetRole) -> WorkerAnswer:
        refusal = self._try_refuse(command.epoch, command.grace_ms)
        if not refusal and command.role not in WORKER_ROLES:
            refusal = f"role {command.role[:32]!r}: must be one of {', '.join(WORKER_ROLES)}"
        if refusal:
            return WorkerAnswer(self._worker_id, refusal)
        if self._next is not None:
            role, worker_id = self._next
            is_other = role != command.role
            return WorkerAnswer(worker_id, f"it is changing its role to {role} already" if is_other else "")
        if command.role == self._role:
            return WorkerAnswer(self._worker_id)
        worker_id = f"{command.role}-{self._context.config.index}-{uuid.uuid4().hex[:8]}"
        try:
            make = self._prepare(command.role, worker_id)
        except ConfigError as error:
            return WorkerAnswer(self._worker_id, f"its settings do not suit a {command.role} worker: {error.message}")
        self._next = command.role, worker_id
        self._tasks.spawn(self._switch(make, command.grace_ms / 1e3), f"change of role to {command.role}")
        return WorkerAnswer(worker_id)

    def _try_refuse(self, epoch: int, grace_ms: int) -> str:
        """Empty: it is obeyed."""
        if epoch < self._epoch:
            return f"epoch {epoch} is over: {self._epoch} leads"
        self._epoch = epoch
        if not 0 <= grace_ms <= _MAX_GRACE_S * 1e3:
            return f"grace_ms {grace_ms}: must be in [0, {_MAX_GRACE_S * 1e3:.0f}]"
        return ""

    async def _switch(self, make: Callable[[], WorkerShell], grace_s: float) -> None:
        if self._next is None:
            raise AssertionError("a change of role without a role")
        old, began_s = self._shell, asyncio.get_running_loop().time()
        await old.empty(grace_s)
        if old.duty is not Duty.DRAINED:
            _log.error("it keeps its role: it did not become empty")
            self._next = None
            old.end_drain()
            return
        self._is_between = True
        await old.drain(_LAST_FRAMES_S)
        emptied_s = asyncio.get_running_loop().time()
        await old.stop()
        if not old.has_let_go:
            self._context.request_shutdown("a step of the old role still runs")
            return
        self._shell = make()
        await self._shell.start()
        (self._role, self._worker_id), self._next = self._next, None
        self._num_switches += 1
        self._is_between = False
        await self._listen()
        now_s = asyncio.get_running_loop().time()
        _log.info(
            "%s worker %s: drained in %.2f s, changed in %.2f s",
            self._role,
            self._worker_id,
            emptied_s - began_s,
            now_s - emptied_s,
        )

    async def _listen(self) -> None:
        """To what is said to the present worker id. Raises BusError."""
        if self._endpoint is not None:
            await self._endpoint.close()
        if self._bus is None:
            return
        self._endpoint = BusEndpoint(self._bus, self._context.tracer)
        await self._endpoint.serve(self._subjects.drain(self._worker_id), SetDrain, self.on_drain)
        await self._endpoint.serve(self._subjects.role(self._worker_id), SetRole, self.on_role)


class _PresentServicer(worker_pb2_grpc.WorkerServicer):
    """Passes streams on to the shell that there is; a server takes no servicers once it has started."""

    def __init__(self, try_shell: Callable[[], WorkerShell | None]) -> None:
        self._try_shell = try_shell

    async def Serve(  # noqa: N802 - the method's name on the wire
        self,
        request_iterator: AsyncIterator[worker_pb2.ServeRequest],
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> AsyncIterator[worker_pb2.ServeResponse]:
        shell = self._try_shell()
        if shell is None:
            raise Unavailable("this worker is changing its role", retry_after_s=_RETRY_AFTER_S)
        async for response in shell.servicer.Serve(request_iterator, context):
            yield response

"""What follows a limits file: a limits keeper alone, and the operators' calls of whole schedulers."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import grpc.aio
from grpc_health.v1 import health
from tests.unit.scheduler.rig import make_limits
from tests.unit.scheduler.scripted import SUBJECTS

from weir.bus.codec import decode
from weir.bus.configuration import MESSAGE_TYPES, Written
from weir.bus.in_memory import InMemoryHub
from weir.client.scheduling import SchedulingClient, SchedulingView
from weir.rpc.access import Callers, Port, RpcAccess
from weir.rpc.channel import make_channel
from weir.rpc.errors import from_rpc_error
from weir.rpc.server import AccessGuard, ErrorGuard, make_server
from weir.runtime.admin import AdminService, Identity
from weir.runtime.service import add_common_services
from weir.wire.v1 import scheduling_pb2, scheduling_pb2_grpc
from weir_scheduler.component import SchedulerComponent
from weir_scheduler.effective_limits import EffectiveLimits
from weir_scheduler.limits_keeper import LimitsKeeper, LimitsSource
from weir_scheduler.operator_calls import OperatorGate, SchedulingServicer, WorkerOperations

_T = TypeVar("_T")
FILE = "[tenants.acme]\nweight = 2\n"
OTHER_FILE = "[tenants.acme]\nweight = 4\n"


def write(path: Path, content: str | bytes | None) -> None:
    """None: the file is gone."""
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


class Keeping:
    """A keeper over the in-memory bus, and the changes that reached the core."""

    def __init__(self, hub: InMemoryHub, path: Path | None, *, epoch: int = 1, policy: str = "fcfs") -> None:
        self._hub = hub
        self._path = path
        self._epoch = epoch
        self._policy = policy
        self.changes: list[str] = []
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> "Keeping":
        self.bucket = await self._hub.connect().bucket(SUBJECTS.configuration_bucket, durable=True)
        source = None if self._path is None else LimitsSource(self._path)
        effective_limits = EffectiveLimits(make_limits(), self._policy)
        self.keeper = LimitsKeeper(effective_limits, source, self.bucket, self._epoch, look_s=0.02)
        await self.keeper.load()
        self.keeper.attach(lambda: self.changes.append("limits"), lambda: self.changes.append("policy"))
        await self.keeper.publish()
        self._task = asyncio.create_task(self.keeper.keep())
        return self

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def weight(self) -> float:
        return self.keeper.effective_limits.limits.tenants_by_name["acme"].weight

    async def published(self, key: str) -> Written:
        entry = await self.bucket.get(key)
        assert entry is not None
        assert entry.value is not None
        return decode(MESSAGE_TYPES[key], entry.value)


class Served:
    """The operators' calls of schedulers, over real gRPC."""

    def __init__(self, *components: SchedulerComponent, admin_key: str = "", has_guard: bool = True) -> None:
        """`has_guard`: at the port's door, as in a process."""
        self._components = components
        self._has_guard = has_guard
        self._admin_key = admin_key

    async def __aenter__(self) -> "Served":
        self._servers = []
        addresses = []
        for component in self._components:
            gate, access = OperatorGate(component.leader_admins, component.changes), RpcAccess(Port.INNER)
            access.answer(Callers.OPERATOR, gate.check)
            server = make_server([AccessGuard(access), ErrorGuard()] if self._has_guard else [ErrorGuard()])
            self._servers.append(server)
            scheduling_pb2_grpc.add_SchedulingServicer_to_server(SchedulingServicer(gate), server)
            admin = AdminService(Identity("scheduler", "scheduler-0-aa", ""), component.describe)
            admin.answer_operators(WorkerOperations(gate))
            add_common_services(server, admin, health.aio.HealthServicer(), ["weir.v1.Scheduling"])
            addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
            await server.start()
        self.addresses = addresses
        self._client = SchedulingClient(addresses, admin_key=self._admin_key)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._client.close()
        for server in self._servers:
            await server.stop(None)

    async def call(self, method: Callable[[], _T]) -> _T:
        """One that blocks."""
        return await asyncio.to_thread(method)

    async def describe(self) -> SchedulingView:
        return await asyncio.to_thread(self._client.describe)

    async def set_limits(self, changes: dict[str, str]) -> str:
        return await asyncio.to_thread(self._client.set_limits, changes)

    async def set_raw(self, settings: Sequence[tuple[str, str]]) -> None:
        """As they are, also what the client cannot say."""
        request = scheduling_pb2.SetLimitsRequest(
            settings=[scheduling_pb2.LimitSetting(key=key, value=value) for key, value in settings]
        )
        async with make_channel(self.addresses[0]) as channel:
            stub: scheduling_pb2_grpc.SchedulingAsyncStub = scheduling_pb2_grpc.SchedulingStub(channel)
            try:
                await stub.SetLimits(request, timeout=10)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error

    async def set_policy(self, policy: str) -> str:
        return await asyncio.to_thread(self._client.set_policy, policy)

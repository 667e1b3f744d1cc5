"""What operators have workers do through the scheduler: who may, which worker can be spared, what it answers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from tests.unit.scheduler.keeping import write
from tests.unit.scheduler.rig import Rig, make_limits, make_worker
from tests.unit.scheduler.scripted import SUBJECTS, Stack, eventually

from weir.bus.endpoint import BusEndpoint
from weir.bus.messages import SetDrain, SetRole, WorkerAnswer
from weir.client.workers import WorkersClient, WorkerView
from weir.core.credentials import key_digest, make_key
from weir.core.errors import InvalidRequest, NotFound, Unauthenticated, Unavailable
from weir.rpc.channel import make_channel
from weir.rpc.server import ErrorGuard, make_server
from weir.runtime.admin import AdminService, Description, Identity
from weir.wire.v1 import admin_pb2, admin_pb2_grpc
from weir_scheduler.operator_calls import OperatorGate, WorkerOperations

ADMIN_KEY = make_key()


class TellingWorker:
    """Does as it is told in the registry, and remembers it."""

    def __init__(self, stack: Stack, worker_id: str) -> None:
        self.stack = stack
        self.worker_id = worker_id
        self.told: list[SetDrain | SetRole] = []
        self.refusal = ""
        self._endpoint = BusEndpoint(stack.hub.connect(), stack.tracer)

    async def start(self) -> "TellingWorker":
        await self._endpoint.serve(SUBJECTS.drain(self.worker_id), SetDrain, self.on_drain)
        await self._endpoint.serve(SUBJECTS.role(self.worker_id), SetRole, self.on_role)
        return self

    async def on_drain(self, command: SetDrain) -> WorkerAnswer:
        self.told.append(replace(command, epoch=1))
        record = self.stack.workers[self.worker_id]
        is_draining = command.is_draining
        self.stack.workers[self.worker_id] = replace(record, is_draining=is_draining, is_drained=is_draining)
        return WorkerAnswer(self.worker_id, self.refusal)

    async def on_role(self, command: SetRole) -> WorkerAnswer:
        self.told.append(replace(command, epoch=1))
        return WorkerAnswer(f"{command.role}-new", self.refusal)


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    limits = tmp_path / "limits.toml"
    limits.write_text("")
    whole = Stack(limits=make_limits(gather_s=0.1), limits_file=str(limits))
    whole.workers |= {"d2": make_worker("d2", "decode")}
    yield whole
    await whole.close()


@pytest.fixture
async def address(stack: Stack) -> AsyncIterator[str]:
    """Of a scheduler's Admin service."""
    component = await stack.add_scheduler()
    admin = AdminService(Identity("scheduler", "s0", ""), Description)
    admin.answer_operators(WorkerOperations(OperatorGate(component.leader_admins)))
    server = make_server([ErrorGuard()])
    admin_pb2_grpc.add_AdminServicer_to_server(admin, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    await eventually(lambda: component.describe().metrics["workers"] == 3)
    yield address
    await server.stop(None)


async def ask(address: str, call: Callable[[WorkersClient], object], admin_key: str = "") -> object:
    def in_thread() -> object:
        with WorkersClient([address], admin_key=admin_key) as client:
            return call(client)

    return await asyncio.to_thread(in_thread)


async def duty_of(address: str, worker_id: str) -> str:
    views = await ask(address, lambda client: client.list())
    assert isinstance(views, list)
    return next(str(view.duty) for view in views if view.worker_id == worker_id)


async def test_a_drain_reaches_the_worker_shows_in_the_list_and_can_be_taken_back(stack: Stack, address: str) -> None:
    worker = await TellingWorker(stack, "d").start()
    before = await ask(address, lambda client: client.drain("d", grace_s=2.5))
    assert isinstance(before, WorkerView)
    assert (before.role, before.duty) == ("decode", "serving")
    assert worker.told == [SetDrain(1, is_draining=True, grace_ms=2500)]
    async with asyncio.timeout(5):
        while await duty_of(address, "d") != "drained":  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.05)
    again = await ask(address, lambda client: client.drain("d", grace_s=0))
    assert isinstance(again, WorkerView)
    assert again.duty == "drained"
    await ask(address, lambda client: client.end_drain("d"))
    assert worker.told[-1] == SetDrain(1, is_draining=False)


async def test_the_last_worker_that_serves_a_model_is_drained_by_force_alone(stack: Stack, address: str) -> None:
    worker = await TellingWorker(stack, "d").start()
    await stack.delete_worker("d2")
    async with asyncio.timeout(5):
        while True:
            views = await ask(address, lambda client: client.list())
            assert isinstance(views, list)
            if all(view.duty == "silent" for view in views if view.worker_id == "d2"):
                break
            await asyncio.sleep(0.05)
    with pytest.raises(InvalidRequest, match="without d no worker serves its model") as refused:
        await ask(address, lambda client: client.drain("d", grace_s=0))
    assert refused.value.violations[0].field == "force"
    with pytest.raises(InvalidRequest, match="without d no worker"):
        await ask(address, lambda client: client.set_role("d", "prefill", grace_s=0))
    assert worker.told == []
    await ask(address, lambda client: client.drain("d", grace_s=0, force=True))
    assert len(worker.told) == 1


async def test_a_role_reaches_the_worker_and_its_own_role_does_not(stack: Stack, address: str) -> None:
    worker = await TellingWorker(stack, "d").start()
    assert await ask(address, lambda client: client.set_role("d", "decode", grace_s=0)) == "d"
    assert worker.told == []
    assert await ask(address, lambda client: client.set_role("d", "prefill", grace_s=1)) == "prefill-new"
    assert worker.told == [SetRole(1, "prefill", 1000)]
    worker.refusal = "not now"
    with pytest.raises(InvalidRequest, match="d refuses: not now"):
        await ask(address, lambda client: client.set_role("d", "prefill", grace_s=1))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda client: client.drain("nobody", grace_s=1), NotFound, "no worker 'nobody'; there are: d, d2, p"),
        (lambda client: client.end_drain(""), NotFound, "no worker ''"),
        (lambda client: client.drain("d", grace_s=3601), InvalidRequest, "grace_ms: 3601000: must be at most"),
        (lambda client: client.set_role("d", "gateway", grace_s=1), InvalidRequest, "role: 'gateway': must be"),
        (lambda client: client.drain("d", grace_s=1), Unavailable, "worker d does not answer"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(
    address: str, call: Callable[[WorkersClient], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        await ask(address, call)


async def test_only_operators_are_obeyed_where_there_are_keys(stack: Stack, address: str) -> None:
    worker = await TellingWorker(stack, "d").start()
    write(Path(stack.limits_file), f'admin_key_digests = ["{key_digest(ADMIN_KEY).hex()}"]\n')
    async with asyncio.timeout(10):
        while True:
            try:
                await ask(address, lambda client: client.list())
            except Unauthenticated:
                break
            await asyncio.sleep(0.05)
    for call in (
        lambda client: client.drain("d", grace_s=0),
        lambda client: client.end_drain("d"),
        lambda client: client.set_role("d", "prefill", grace_s=0),
    ):
        with pytest.raises(Unauthenticated):
            await ask(address, call)
    assert worker.told == []
    await ask(address, lambda client: client.drain("d", grace_s=0), admin_key=ADMIN_KEY)
    assert len(worker.told) == 1


async def test_a_process_that_is_no_scheduler_says_whom_to_ask() -> None:
    server = make_server([ErrorGuard()])
    service = AdminService(Identity("decode", "d", ""), Description)
    admin_pb2_grpc.add_AdminServicer_to_server(service, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with make_channel(address) as channel:
        stub: admin_pb2_grpc.AdminAsyncStub = admin_pb2_grpc.AdminStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Drain(admin_pb2.DrainRequest(worker_id="d"), timeout=5)
    await server.stop(None)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "ask the leading scheduler" in (refused.value.details() or "")


def test_who_can_be_spared() -> None:
    local = replace(make_worker("d", "decode"), serves_locally=True)
    rig = Rig().start(make_worker("p", "prefill"), local, make_worker("d2", "decode"))
    workers = rig.core.workers
    assert workers.can_spare("d")
    assert workers.can_spare("d2")
    assert workers.can_spare("p"), "d serves whole requests"
    rig.core.worker_seen(replace(local, is_draining=True), 10_000)
    assert not workers.can_spare("d2"), "the other one drains"
    assert not workers.can_spare("p")
    assert workers.can_spare("d"), "it serves nobody now"

"""A gateway's connection to a real worker is cut, and what runs there is cancelled meanwhile."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.unit.worker.rig import GATEWAY, Rig, eventually, resume_command, running_rig, start_command

from weir.core.clock import SystemClock
from weir.core.life import Attempt
from weir.core.tasks import end_tasks
from weir.rpc.channel import PlainDialer
from weir.wire.v1 import worker_pb2
from weir_gateway.workers.connection import ConnectionSettings, Dialing, WorkerEndpoint
from weir_gateway.workers.connections import WorkerConnections


class Cable:
    """Stands between a gateway and a worker; while it is cut, no connection lives."""

    def __init__(self, address: str) -> None:
        self.address = ""
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._is_cut = False
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def laid(self) -> AsyncIterator["Cable"]:
        server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            await end_tasks(tuple(self._tasks))

    async def cut(self) -> None:
        self._is_cut = True
        await end_tasks(tuple(self._tasks))

    def mend(self) -> None:
        self._is_cut = False

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.close()
            return
        there = await asyncio.open_connection(self._host, self._port)
        for source, sink in ((reader, there[1]), (there[0], writer)):
            task = asyncio.create_task(_carry(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


async def _carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(1 << 16):
            sink.write(data)
            await sink.drain()
    except ConnectionError:
        pass  # either end may go first
    finally:
        sink.close()


class Listener:
    """A request of the gateway that only counts its tokens."""

    def __init__(self, start: worker_pb2.Start) -> None:
        self.start = start
        self.num_tokens = 0

    def on_update(self, worker_id: str, update: worker_pb2.SequenceUpdate) -> None:
        self.num_tokens += len(update.token_ids)

    def on_connection_lost(self, worker_id: str, message: str) -> None:
        pass

    def commands_to_resume(self, worker_id: str) -> list[worker_pb2.ServeRequest]:
        return [worker_pb2.ServeRequest(resume=resume_command(self.start, self.num_tokens))]


@pytest.fixture
async def patient_rig() -> AsyncIterator[Rig]:
    """Its workers wait for a vanished gateway for longer than any test lasts: they end nothing by themselves."""
    async with running_rig(gateway_gone_s=600.0) as made:
        yield made


@asynccontextmanager
async def opened_connections(lost_after_s: float) -> AsyncIterator[WorkerConnections]:
    connections = WorkerConnections(
        Dialing(GATEWAY, PlainDialer(), ConnectionSettings(lost_after_s=lost_after_s)),
        SystemClock(),
        peers_of=lambda worker_id: [],
        is_wanted=lambda *attempt: False,
    )
    try:
        yield connections
    finally:
        await connections.close()


async def run_on(rig: Rig, connections: WorkerConnections, decode_address: str) -> Listener:
    """A long answer whose decode has begun."""
    listener = Listener(start_command(rig.decode.worker_id, max_tokens=300))
    request_id = listener.start.request_id
    prefill = connections.connect(WorkerEndpoint(rig.prefill.worker_id, rig.prefill.address))
    decode = connections.connect(WorkerEndpoint(rig.decode.worker_id, decode_address))
    for connection in (prefill, decode):
        connection.subscribe(request_id, listener)
        await connection.wait_connected()
    decode.send(worker_pb2.ServeRequest(resume=resume_command(listener.start)))
    prefill.send(worker_pb2.ServeRequest(start=listener.start))
    await eventually(lambda: listener.num_tokens > 3)
    return listener


def cancel(connections: WorkerConnections, rig: Rig, listener: Listener) -> None:
    request_id = listener.start.request_id
    connections.cancel(rig.decode.worker_id, request_id, Attempt(1))
    for worker_id in (rig.prefill.worker_id, rig.decode.worker_id):
        connection = connections.try_get(worker_id)
        if connection is not None:
            connection.unsubscribe(request_id)


async def test_what_is_cancelled_while_the_connection_is_cut_ends_and_frees_its_pages(patient_rig: Rig) -> None:
    rig = patient_rig
    rig.on_run["decode"] = lambda plan: time.sleep(0.02)
    async with Cable(rig.decode.address).laid() as cable, opened_connections(lost_after_s=60.0) as connections:
        listener = await run_on(rig, connections, cable.address)
        connection = connections.connect(WorkerEndpoint(rig.decode.worker_id, cable.address))
        await cable.cut()
        await eventually(lambda: not connection.is_connected)
        cancel(connections, rig, listener)
        cable.mend()
        await rig.wait_idle()
        assert rig.decode.metrics()["cancelled_total"] == 1
        await eventually(lambda: connections.metrics()["cancels_unconfirmed"] == 0)


async def test_what_is_cancelled_after_its_worker_was_given_up_ends_once_another_request_reaches_it(
    patient_rig: Rig,
) -> None:
    rig = patient_rig
    rig.on_run["decode"] = lambda plan: time.sleep(0.02)
    async with Cable(rig.decode.address).laid() as cable, opened_connections(lost_after_s=0.2) as connections:
        listener = await run_on(rig, connections, cable.address)
        await cable.cut()
        await eventually(lambda: connections.try_get(rig.decode.worker_id) is None)
        cancel(connections, rig, listener)
        cable.mend()
        other = await run_on(rig, connections, cable.address)
        await eventually(lambda: rig.decode.metrics()["cancelled_total"] == 1)
        assert rig.decode.metrics()["finished_total"] == 0, "it ended because it was cancelled"
        cancel(connections, rig, other)
        await rig.wait_idle()
        assert rig.decode.metrics()["cancelled_total"] == 2

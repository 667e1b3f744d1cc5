"""The service over a real Unix socket, with real clients; only the processes that hold leases are pretended."""

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc.aio
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from weir.core.attempt import Attempt
from weir.core.errors import DeadlineExceeded, InternalError, Overloaded, Unavailable
from weir.core.sampling import SamplingParams, StopRules
from weir.kv.geometry import ArenaGeometry
from weir.kv.process import ProcessIdentity, own_identity, own_pid_namespace
from weir.kv.record import SequenceFacts
from weir.kv.segment import claim_segment
from weir.rpc import arena_client
from weir.rpc.arena_client import ArenaClient, HandedOff
from weir.rpc.channel import make_channel
from weir.rpc.server import ErrorGuard, TraceContextGuard, make_server
from weir.wire.v1 import arena_pb2, arena_pb2_grpc
from weir_transfer.lease_keeper import LeaseTimes
from weir_transfer.service import TransferService

_GEOMETRY = ArenaGeometry(page_bytes=4096, num_pages=40, num_slots=6, max_context_tokens=256)
_TIMES = LeaseTimes(heartbeat_interval_ms=50, lease_ttl_ms=500)
_ATTEMPT = Attempt(1, 0)


class PretendedProcess:
    """A pipe that becomes readable when the process is killed."""

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe()
        self.num_kills = 0

    def fileno(self) -> int:
        return self._read_fd

    def kill(self) -> None:
        self.num_kills += 1
        os.write(self._write_fd, b"x")

    def close(self) -> None:
        os.close(self._read_fd)
        os.close(self._write_fd)


class Host:
    """One transfer service after the other on one socket, and clients that are closed at the end."""

    def __init__(self, directory: Path) -> None:
        self.socket_path = directory / "arena.sock"
        self.segment_path = directory / "arena"
        self.spans = InMemorySpanExporter()
        self.processes: list[PretendedProcess] = []
        self.is_process_there = True
        self.shutdown_reasons: list[str] = []
        self._provider = TracerProvider(shutdown_on_exit=False)
        self._provider.add_span_processor(SimpleSpanProcessor(self.spans))
        self._clients: list[ArenaClient] = []

    async def start(self) -> None:
        claimed = claim_segment(self.segment_path, _GEOMETRY, "digest")
        tracer = self._provider.get_tracer("test")
        self.service = TransferService(
            claimed.segment, _TIMES, self._open_process, tracer, self.shutdown_reasons.append
        )
        self._server = make_server([TraceContextGuard(tracer), ErrorGuard()])
        self.service.add_to(self._server)
        self._server.add_insecure_port(f"unix:{self.socket_path}")
        await self._server.start()
        await self.service.start()

    async def stop(self) -> None:
        await self.service.stop()
        await self._server.stop(0)

    async def client(self, worker_id: str, on_handed_off: Callable[[HandedOff], None] = print) -> ArenaClient:
        made = ArenaClient(self.socket_path, worker_id, "decode", 4096, "digest", on_handed_off)
        await made.start(5)
        self._clients.append(made)
        return made

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        await _until(lambda: self.metric("leases") == 0)
        assert self.service.describe().integrity_errors == ()
        assert self.metric("free_pages") == 40
        await self.stop()
        assert not self.segment_path.exists()

    def metric(self, name: str) -> float:
        return self.service.describe().metrics[name]

    def tracer_span(self, name: str) -> contextlib.AbstractContextManager[object]:
        return self._provider.get_tracer("test").start_as_current_span(name)

    def _open_process(self, identity: ProcessIdentity) -> PretendedProcess | None:
        assert identity == own_identity()
        if not self.is_process_there:
            return None
        self.processes.append(PretendedProcess())
        return self.processes[-1]


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    with tempfile.TemporaryDirectory(prefix="weir-") as directory:  # pytest's own paths are too long for a socket
        made = Host(Path(directory))
        await made.start()
        yield made
        await made.close()
        assert made.shutdown_reasons == []


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - what is waited for is in books of another task
            await asyncio.sleep(0.01)


def _write_sequence(client: ArenaClient, slot: int, page_ids: tuple[int, ...], request_id: str = "r1") -> None:
    record = client.segment.record(slot)
    facts = SequenceFacts(
        request_id, _ATTEMPT, "gateway-0", (1, 2, 3), SamplingParams(), StopRules(max_tokens=8), len(page_ids), ""
    )
    record.begin(facts)
    record.set_block_table(page_ids)
    record.append_token(4)
    record.publish(num_computed_tokens=3)


async def test_a_sequence_goes_from_one_client_to_the_other_and_back_to_the_free_list(host: Host) -> None:
    arrived: list[HandedOff] = []
    prefill, decode = await host.client("prefill"), await host.client("decode", arrived.append)
    acquired = await prefill.acquire(4, 1)
    prefill.segment.pages[acquired.page_ids[2], 9] = 77
    _write_sequence(prefill, acquired.slots[0], acquired.page_ids)

    receipt = await prefill.hand_off(acquired.slots[0], "r1", _ATTEMPT, "decode")
    await _until(lambda: bool(arrived))

    assert (receipt.num_pages, receipt.num_bytes_copied) == (4, 0)
    assert (arrived[0].slot, arrived[0].request_id, arrived[0].attempt) == (acquired.slots[0], "r1", _ATTEMPT)
    snapshot = decode.segment.record(arrived[0].slot).read()
    assert snapshot is not None
    assert snapshot.block_table == acquired.page_ids
    assert decode.segment.pages[snapshot.block_table[2], 9] == 77
    await decode.release(snapshot.block_table, [arrived[0].slot])
    assert (host.metric("free_pages"), host.metric("free_slots")) == (40, 6)


async def test_a_hand_off_is_a_span_of_the_callers_trace(host: Host) -> None:
    prefill, _ = await host.client("prefill"), await host.client("decode")
    acquired = await prefill.acquire(2, 1)
    _write_sequence(prefill, acquired.slots[0], acquired.page_ids)
    with host.tracer_span("request"):
        await prefill.hand_off(acquired.slots[0], "r1", _ATTEMPT, "decode")
    spans = {span.name: span for span in host.spans.get_finished_spans()}
    trace_ids = {span.context.trace_id for span in spans.values() if span.context is not None}
    assert len(trace_ids) == 1
    assert spans["hand_off"].attributes is not None
    assert spans["hand_off"].attributes["weir.num_pages"] == 2
    assert spans["hand_off"].attributes["weir.num_bytes_copied"] == 0


async def test_too_much_asked_for_is_an_overload_with_a_hint(host: Host) -> None:
    client = await host.client("w")
    with pytest.raises(Overloaded, match="free are 40 and 6") as caught:
        await client.acquire(41, 0)
    assert caught.value.retry_after_s is not None


async def test_a_lease_survives_a_restart_of_the_service(host: Host) -> None:
    arrived: list[HandedOff] = []
    prefill, decode = await host.client("prefill"), await host.client("decode", arrived.append)
    acquired = await prefill.acquire(6, 2)
    _write_sequence(prefill, acquired.slots[0], acquired.page_ids[:4])
    lease_ids = (prefill.lease_id, decode.lease_id)

    await host.stop()
    handing_off = asyncio.create_task(prefill.hand_off(acquired.slots[0], "r1", _ATTEMPT, "decode"))
    acquiring = asyncio.create_task(decode.acquire(3, 1))
    await asyncio.sleep(0.2)
    assert not handing_off.done()
    await host.start()

    assert (await handing_off).num_pages == 4
    assert len((await acquiring).page_ids) == 3
    await _until(lambda: bool(arrived))
    assert (prefill.lease_id, decode.lease_id) == lease_ids
    assert not prefill.lost.is_set()
    assert not decode.lost.is_set()
    assert host.metric("leased_pages") == 9
    assert all(process.num_kills == 0 for process in host.processes)


async def test_an_answer_that_got_lost_leaks_nothing(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await host.client("w")
    acquire = client._stub.Acquire
    num_calls = 0

    async def answer_is_lost(request: arena_pb2.AcquireRequest, timeout: float) -> arena_pb2.AcquireResponse:  # noqa: ASYNC109
        nonlocal num_calls
        num_calls += 1
        answer = await acquire(request, timeout=timeout)
        if num_calls == 1:
            assert host.metric("leased_pages") == 5
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "lost")
        return answer

    monkeypatch.setattr(client._stub, "Acquire", answer_is_lost)
    acquired = await client.acquire(5, 1)
    assert num_calls >= 2
    assert host.metric("leased_pages") == 5
    assert host.metric("reclaimed_pages_total") == 5
    await client.release(acquired.page_ids, acquired.slots)
    assert host.metric("free_pages") == 40


async def test_a_cancelled_acquire_leaks_nothing(host: Host) -> None:
    client = await host.client("w")
    for delay_s in (0.0, 0.0005, 0.001, 0.002):
        acquiring = asyncio.create_task(client.acquire(5, 1))
        await asyncio.sleep(delay_s)
        acquiring.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            acquired = await acquiring
            await client.release(acquired.page_ids, acquired.slots)
    await _until(lambda: host.metric("free_pages") == 40)
    await client.acquire(40, 6)


async def test_what_is_not_held_cannot_be_released(host: Host) -> None:
    client = await host.client("w")
    with pytest.raises(ValueError, match=r"not held: pages \[3\], slots \[\]"):
        await client.release([3], [])


async def test_a_hand_off_to_nobody_leaves_the_sequence_where_it_is(host: Host) -> None:
    client = await host.client("w")
    acquired = await client.acquire(2, 1)
    _write_sequence(client, acquired.slots[0], acquired.page_ids)
    with pytest.raises(Unavailable, match="worker nobody has no lease"):
        await client.hand_off(acquired.slots[0], "r1", _ATTEMPT, "nobody")
    with pytest.raises(InternalError, match="has the record of r1"):
        await client.hand_off(acquired.slots[0], "another", _ATTEMPT, "nobody")
    await client.release(acquired.page_ids, acquired.slots)


async def test_a_hand_off_without_an_answer_in_time_is_settled_by_the_service(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await host.client("w")
    acquired = await client.acquire(3, 1)
    _write_sequence(client, acquired.slots[0], acquired.page_ids[:2])

    async def no_answer(*_: object, **__: object) -> None:
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "lost")

    monkeypatch.setattr(arena_client, "_CALL_DEADLINE_S", 0.1)
    monkeypatch.setattr(client._stub, "HandOff", no_answer)
    with pytest.raises(DeadlineExceeded):
        await client.hand_off(acquired.slots[0], "r1", _ATTEMPT, "decode")
    await _until(lambda: host.metric("free_slots") == 6)
    assert host.metric("leased_pages") == 1
    with pytest.raises(ValueError, match="not held"):
        await client.release(acquired.page_ids, acquired.slots)


async def test_a_silent_worker_is_killed_and_only_its_exit_frees(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await host.client("w")
    acquired = await client.acquire(4, 1)
    _write_sequence(client, acquired.slots[0], acquired.page_ids)
    process = host.processes[0]
    monkeypatch.setattr(process, "kill", lambda: None)
    assert client._stream._keeping is not None
    client._stream._keeping.cancel()
    await _until(lambda: host.metric("fencing_leases") == 1)
    await asyncio.sleep(0.2)
    assert host.metric("leased_pages") == 4, "it was killed but has not exited"
    PretendedProcess.kill(process)
    await _until(lambda: host.metric("free_pages") == 40)
    assert (host.metric("fenced_total"), host.metric("orphaned_total")) == (1, 1)


async def test_a_worker_that_was_fenced_is_told_so_when_it_comes_back(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await host.client("w")
    monkeypatch.setattr(host.processes[0], "kill", lambda: None)
    host.service._core.end_lease(client.lease_id)
    client._stream.renew()
    async with asyncio.timeout(5):
        await client.lost.wait()
    with pytest.raises(Unavailable, match="refuses this worker"):
        await client.acquire(1, 0)


async def test_leases_that_are_left_keep_the_segment_for_the_next_start(host: Host) -> None:
    client = await host.client("w")
    await client.acquire(4, 1)
    await host.stop()
    assert host.segment_path.exists()
    await host.start()
    await _until(lambda: host.metric("suspect_leases") == 0)
    assert host.metric("leased_pages") == 4


async def test_draining_waits_for_the_workers_to_leave(host: Host) -> None:
    client = await host.client("w")
    draining = asyncio.create_task(host.service.drain(5))
    await asyncio.sleep(0.2)
    assert not draining.done()
    await client.close()
    await asyncio.wait_for(draining, 2)


async def test_a_worker_of_another_pid_namespace_is_refused_with_advice(host: Host) -> None:
    register = arena_pb2.Register(worker_id="w", role="decode", pid=7, pid_namespace=own_pid_namespace() + 1)
    assert "another pid namespace" in await _refusal(host, register)
    assert "shareProcessNamespace" in await _refusal(host, register)


async def test_a_worker_whose_process_cannot_be_found_is_refused(host: Host) -> None:
    host.is_process_there = False
    client = ArenaClient(host.socket_path, "w", "decode", 4096, "digest", print)
    with pytest.raises(Unavailable, match=r"refuses this worker: ProcessIdentity.* does not exist"):
        await client.start(5)


async def test_a_stream_that_does_not_begin_with_register_is_refused(host: Host) -> None:
    async with make_channel(f"unix:{host.socket_path}") as channel:
        stub: arena_pb2_grpc.ArenaAsyncStub = arena_pb2_grpc.ArenaStub(channel)
        call = stub.Attach(iter([arena_pb2.AttachRequest(heartbeat=arena_pb2.Heartbeat())]))
        assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_service_that_is_not_there_is_waited_for_and_then_named(tmp_path: Path) -> None:
    client = ArenaClient(tmp_path / "none.sock", "w", "decode", 4096, "digest", print)
    with pytest.raises(Unavailable, match="does not answer"):
        await client.start(0.3)


async def _refusal(host: Host, register: arena_pb2.Register) -> str:
    async with make_channel(f"unix:{host.socket_path}") as channel:
        stub: arena_pb2_grpc.ArenaAsyncStub = arena_pb2_grpc.ArenaStub(channel)
        call = stub.Attach(iter([arena_pb2.AttachRequest(register=register)]))
        assert await call.code() == grpc.StatusCode.FAILED_PRECONDITION
        return await call.details() or ""

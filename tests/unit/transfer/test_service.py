"""The service and its client: leases, hand-offs, refusals, over a real Unix socket."""

import asyncio
import tempfile
from pathlib import Path

import grpc.aio
import pytest
from tests.unit.transfer.host import ATTEMPT, Host, until, write_sequence

from weir.core.errors import Overloaded, Unavailable
from weir.core.process import own_pid_namespace
from weir.rpc.arena.client import ArenaClient, HandedOff, WorkerIdentity
from weir.rpc.channel import make_channel
from weir.wire.v1 import arena_pb2, arena_pb2_grpc
from weir_transfer import lease_keeper
from weir_transfer.messages import ArenaSettings


async def test_a_sequence_goes_from_one_client_to_the_other_and_back_to_the_free_list(host: Host) -> None:
    arrived: list[HandedOff] = []
    prefill, decode = await host.client("prefill"), await host.client("decode", arrived.append)
    acquired = await prefill.acquire(4, 1)
    prefill.segment.pages[acquired.page_ids[2], 9] = 77
    write_sequence(prefill, acquired.slots[0], acquired.page_ids)

    receipt = await prefill.hand_off(acquired.slots[0], "r1", ATTEMPT, "decode")
    await until(lambda: bool(arrived))

    assert (receipt.num_pages, receipt.num_bytes_copied) == (4, 0)
    assert (arrived[0].slot, arrived[0].request_id, arrived[0].attempt) == (acquired.slots[0], "r1", ATTEMPT)
    snapshot = decode.segment.record(arrived[0].slot).read()
    assert snapshot is not None
    assert snapshot.block_table == acquired.page_ids
    assert decode.segment.pages[snapshot.block_table[2], 9] == 77
    await decode.release(snapshot.block_table, [arrived[0].slot])
    assert (host.metric("free_pages"), host.metric("free_slots")) == (40, 6)


async def test_a_hand_off_is_a_span_of_the_callers_trace(host: Host) -> None:
    prefill, _ = await host.client("prefill"), await host.client("decode")
    acquired = await prefill.acquire(2, 1)
    write_sequence(prefill, acquired.slots[0], acquired.page_ids)
    with host.tracer_span("request"):
        await prefill.hand_off(acquired.slots[0], "r1", ATTEMPT, "decode")
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
    write_sequence(prefill, acquired.slots[0], acquired.page_ids[:4])
    lease_ids = (prefill.lease_id, decode.lease_id)

    await host.stop()
    handing_off = asyncio.create_task(prefill.hand_off(acquired.slots[0], "r1", ATTEMPT, "decode"))
    acquiring = asyncio.create_task(decode.acquire(3, 1))
    await asyncio.sleep(0.2)
    assert not handing_off.done()
    await host.start()

    assert (await handing_off).num_pages == 4
    assert len((await acquiring).page_ids) == 3
    await until(lambda: bool(arrived))
    assert (prefill.lease_id, decode.lease_id) == lease_ids
    assert not prefill.lost.is_set()
    assert not decode.lost.is_set()
    assert host.metric("leased_pages") == 9
    assert all(process.num_kills == 0 for process in host.processes)


async def test_a_worker_of_another_pid_namespace_is_refused_with_advice(host: Host) -> None:
    register = arena_pb2.Register(worker_id="w", role="decode", pid=7, pid_namespace=own_pid_namespace() + 1)
    assert "another pid namespace" in await _refusal(host, register)
    assert "shareProcessNamespace" in await _refusal(host, register)


async def test_a_worker_whose_process_cannot_be_found_is_refused(host: Host) -> None:
    host.is_process_there = False
    client = ArenaClient(host.socket_path, WorkerIdentity("w", "decode", 4096, "digest"), print)
    with pytest.raises(Unavailable, match=r"refuses this worker: ProcessIdentity.* does not exist"):
        await client.start(5)


async def test_a_stream_that_does_not_begin_with_register_is_refused(host: Host) -> None:
    async with make_channel(f"unix:{host.socket_path}") as channel:
        stub: arena_pb2_grpc.ArenaAsyncStub = arena_pb2_grpc.ArenaStub(channel)
        call = stub.Attach(iter([arena_pb2.AttachRequest(heartbeat=arena_pb2.Heartbeat())]))
        assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_service_that_is_not_there_is_waited_for_and_then_named(tmp_path: Path) -> None:
    client = ArenaClient(tmp_path / "none.sock", WorkerIdentity("w", "decode", 4096, "digest"), print)
    with pytest.raises(Unavailable, match="does not answer"):
        await client.start(0.3)


async def test_what_ends_is_seen_to_at_once_however_rare_ticks_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_keeper, "_MAX_PAUSE_S", 60.0)
    rare = ArenaSettings(heartbeat_interval_ms=60_000, lease_ttl_ms=600_000, adoption_wait_ms=0)
    with tempfile.TemporaryDirectory(prefix="weir-") as directory:
        host = Host(Path(directory), rare)
        await host.start()
        client = await host.client("w")
        await client.acquire(5, 1)
        await client.close()
        await until(lambda: host.metric("free_pages") == 40 and host.metric("leases") == 0)
        async with asyncio.timeout(5):
            await host.service.drain(60)
        await host.close()


async def _refusal(host: Host, register: arena_pb2.Register) -> str:
    async with make_channel(f"unix:{host.socket_path}") as channel:
        stub: arena_pb2_grpc.ArenaAsyncStub = arena_pb2_grpc.ArenaStub(channel)
        call = stub.Attach(iter([arena_pb2.AttachRequest(register=register)]))
        assert await call.code() == grpc.StatusCode.FAILED_PRECONDITION
        return await call.details() or ""

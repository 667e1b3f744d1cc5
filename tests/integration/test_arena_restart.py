"""kill -9 of the transfer service: its next process goes on with the segment as it is."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc.aio
import pytest
from tests.integration.arena_process import MODEL_DIGEST, PAGE_BYTES, TransferProcess, sleeping_process

from weir.core.life import Attempt
from weir.core.process import ProcessIdentity, own_pid_namespace
from weir.core.sampling import SamplingParams, StopRules
from weir.kv.records.record import SequenceParams
from weir.rpc.arena.client import ArenaAccess, ArenaClient, HandedOff, WorkerIdentity
from weir.rpc.channel import make_channel
from weir.wire.v1 import arena_pb2, arena_pb2_grpc

_TTL_MS = 4000


@pytest.fixture
async def transfer() -> AsyncIterator[TransferProcess]:
    with tempfile.TemporaryDirectory(prefix="weir-") as directory:
        process = TransferProcess(Path(directory), _TTL_MS)
        await process.start()
        yield process
        process.close()


@pytest.fixture
def worker_process() -> Iterator[ProcessIdentity]:
    """Stands for all workers of a test."""
    with sleeping_process() as (sleeper, identity):
        yield identity
        assert sleeper.poll() is None, "nobody had a reason to kill it"


async def _attach(channel: grpc.aio.Channel, identity: ProcessIdentity, lease_id: int = 0) -> arena_pb2.Attached:
    """An attachment of worker `decode` that listens to nothing after the first answer."""
    stub: arena_pb2_grpc.ArenaAsyncStub = arena_pb2_grpc.ArenaStub(channel)
    register = arena_pb2.Register(
        worker_id="decode",
        role="decode",
        pid=identity.pid,
        pid_start_ticks=identity.start_ticks,
        pid_namespace=own_pid_namespace(),
        page_bytes=PAGE_BYTES,
        model_digest=MODEL_DIGEST,
        lease_id=lease_id,
    )
    call = stub.Attach()
    await call.write(arena_pb2.AttachRequest(register=register))
    response = await asyncio.wait_for(call.read(), 10)
    assert isinstance(response, arena_pb2.AttachResponse)
    return response.attached


async def _published_sequence(client: ArenaClient, num_pages: int) -> tuple[int, tuple[int, ...]]:
    acquired = await client.acquire(num_pages, 1)
    record = client.segment.record(acquired.slots[0])
    params = SequenceParams(
        "r1", Attempt(), "gateway", (1, 2), SamplingParams(), StopRules(max_tokens=9), num_pages, ""
    )
    record.begin(params)
    record.set_block_table(acquired.page_ids)
    record.publish(num_computed_tokens=2)
    return acquired.slots[0], acquired.page_ids


async def test_leases_and_a_pending_hand_off_outlive_the_service(
    transfer: TransferProcess, worker_process: ProcessIdentity
) -> None:
    access = ArenaAccess(identity=worker_process)
    prefill = ArenaClient(
        transfer.socket_path, WorkerIdentity("prefill", "prefill", PAGE_BYTES, MODEL_DIGEST), print, access
    )
    await prefill.start()
    async with make_channel(f"unix:{transfer.socket_path}") as channel:
        decode = await _attach(channel, worker_process)
        slot, page_ids = await _published_sequence(prefill, 5)
        prefill.segment.pages[list(page_ids)] = 0x77
        kept = await prefill.acquire(3, 1)
        assert (await prefill.hand_off(slot, "r1", Attempt(), "decode")).num_pages == 5
        lease_id, arena_id = prefill.lease_id, prefill.segment.arena_id

        transfer.kill()
        await transfer.start()

        again = await _attach(channel, worker_process, decode.lease_id)
        assert again.lease_id == decode.lease_id
        assert [(sequence.slot, sequence.request_id) for sequence in again.handed_off_sequences] == [(slot, "r1")]
        await prefill.acquire(0, 0)  # it is attached again
    assert not prefill.lost.is_set()
    assert (prefill.lease_id, transfer.open_segment().arena_id) == (lease_id, arena_id)
    metrics = await transfer.describe()
    assert (metrics["leased_pages"], metrics["fenced_total"], metrics["leases"]) == (8, 0, 2)
    assert (transfer.open_segment().pages[list(page_ids)] == 0x77).all()
    await prefill.release(kept.page_ids, kept.slots)
    await prefill.close()


async def test_calls_wait_for_the_next_process(transfer: TransferProcess, worker_process: ProcessIdentity) -> None:
    arrived: asyncio.Queue[HandedOff] = asyncio.Queue()
    access = ArenaAccess(identity=worker_process)
    prefill = ArenaClient(
        transfer.socket_path, WorkerIdentity("prefill", "prefill", PAGE_BYTES, MODEL_DIGEST), print, access
    )
    decode = ArenaClient(
        transfer.socket_path,
        WorkerIdentity("decode", "decode", PAGE_BYTES, MODEL_DIGEST),
        arrived.put_nowait,
        access,
    )
    await prefill.start()
    await decode.start()
    slot, page_ids = await _published_sequence(prefill, 4)

    transfer.kill()
    handing_off = asyncio.create_task(prefill.hand_off(slot, "r1", Attempt(), "decode"))
    acquiring = asyncio.create_task(decode.acquire(2, 1))
    await transfer.start()

    assert (await handing_off).num_pages == 4
    acquired = await acquiring
    handed_off = await asyncio.wait_for(arrived.get(), 10)
    assert handed_off.slot == slot
    await decode.release((*page_ids, *acquired.page_ids), (slot, *acquired.slots))
    metrics = await transfer.describe()
    assert metrics["free_pages"] == metrics["total_pages"]
    await prefill.close()
    await decode.close()


async def test_a_worker_that_does_not_come_back_is_fenced_after_a_whole_countdown(transfer: TransferProcess) -> None:
    with sleeping_process() as (sleeper, identity):
        async with make_channel(f"unix:{transfer.socket_path}") as channel:
            await _attach(channel, identity)
        transfer.kill()
        await transfer.start()
        await asyncio.sleep(0.5 * _TTL_MS / 1000)
        assert sleeper.poll() is None
        await transfer.wait_for("leases", 0)
        assert sleeper.wait(timeout=10) == -9


async def test_a_worker_that_died_with_the_service_is_freed_at_the_start(transfer: TransferProcess) -> None:
    with sleeping_process() as (_, identity):
        async with make_channel(f"unix:{transfer.socket_path}") as channel:
            await _attach(channel, identity)
    transfer.kill()
    await transfer.start()
    await transfer.wait_for("leases", 0, timeout_s=1)
    assert (await transfer.describe())["fenced_total"] == 0

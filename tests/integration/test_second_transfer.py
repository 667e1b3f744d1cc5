"""Two transfer services of one instance: the second ends with a clear error, and the first notices nothing."""

import asyncio
import socket
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.integration.arena_process import MODEL_DIGEST, PAGE_BYTES, TransferProcess

from weir.rpc.arena.client import ArenaClient, WorkerIdentity

_TTL_MS = 4000


@pytest.fixture
async def transfer() -> AsyncIterator[TransferProcess]:
    with tempfile.TemporaryDirectory(prefix="weir-") as directory:
        process = TransferProcess(Path(directory), _TTL_MS)
        await process.start()
        yield process
        process.close()


async def _serves(transfer: TransferProcess) -> None:
    """To somebody who comes new."""
    client = ArenaClient(
        transfer.socket_path, WorkerIdentity("new", "decode", PAGE_BYTES, MODEL_DIGEST), on_handed_off=print
    )
    await client.start(10)
    await client.acquire(1, 1)
    await client.close()
    await transfer.wait_for("leases", 0)


async def test_a_second_service_on_the_same_socket_ends_and_leaves_all_to_the_first(transfer: TransferProcess) -> None:
    arena_id = transfer.open_segment().arena_id
    second = await asyncio.to_thread(transfer.run_second)
    assert second.returncode == 1
    assert f"could not start: cannot listen on unix:{transfer.socket_path}: in use by another process" in second.stderr
    assert transfer.is_ready
    assert transfer.open_segment().arena_id == arena_id
    await _serves(transfer)


async def test_a_second_service_on_the_same_segment_ends_and_leaves_all_to_the_first(transfer: TransferProcess) -> None:
    own_socket = transfer.socket_path.with_name("second.sock")
    second = await asyncio.to_thread(transfer.run_second, listen=f"unix:{own_socket}")
    assert second.returncode == 1
    assert f"could not start: {transfer.segment_path} is in use by another transfer service; stop it" in second.stderr
    await _serves(transfer)
    assert not own_socket.exists()


async def test_a_service_that_cannot_be_asked_has_its_segment_and_its_socket_all_the_same(
    transfer: TransferProcess,
) -> None:
    """Removed from outside, its socket says nothing; the lock of its segment does."""
    segment = transfer.open_segment()
    transfer.socket_path.rename(transfer.socket_path.with_name("moved"))
    second = await asyncio.to_thread(transfer.run_second)
    assert second.returncode == 1
    assert "is in use by another transfer service" in second.stderr
    transfer.socket_path.with_name("moved").rename(transfer.socket_path)
    assert transfer.open_segment().arena_id == segment.arena_id
    await _serves(transfer)


async def test_an_orderly_end_leaves_the_socket_of_a_successor_and_a_new_start_finds_all_free(
    transfer: TransferProcess,
) -> None:
    transfer.socket_path.unlink()
    with socket.socket(socket.AF_UNIX) as successor:
        successor.bind(str(transfer.socket_path))
        successor.listen()
        assert transfer.terminate() == 0
        assert transfer.socket_path.exists()
    await transfer.start()
    await _serves(transfer)
    assert transfer.terminate() == 0
    assert not transfer.socket_path.exists()
    assert not transfer.segment_path.exists()


async def test_a_segment_that_a_worker_maps_outlives_a_service_with_another_geometry(transfer: TransferProcess) -> None:
    worker = transfer.open_segment()
    transfer.kill()
    second = await asyncio.to_thread(transfer.run_second, **{"num-slots": 9})
    assert second.returncode == 1
    assert f"{transfer.segment_path} cannot be replaced" in second.stderr
    assert transfer.open_segment().arena_id == worker.arena_id
    worker.close()

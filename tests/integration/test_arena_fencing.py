"""A worker that stops for longer than its lease is dead when it would go on, and never writes again."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.integration.arena_process import MODEL_DIGEST, PAGE_BYTES, TransferProcess, ended, sleeping_process

from weir.rpc.arena.client import ArenaClient, WorkerIdentity
from weir_transfer.fence import try_open_process

_TTL_MS = 1000
_LONG_TTL_MS = 600_000
_IN_OWN_NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc")
_REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
async def transfer() -> AsyncIterator[TransferProcess]:
    async with _running(_TTL_MS) as process:
        yield process


@pytest.fixture
async def patient_transfer() -> AsyncIterator[TransferProcess]:
    """No lease of it ends by silence."""
    async with _running(_LONG_TTL_MS) as process:
        yield process


@asynccontextmanager
async def _running(lease_ttl_ms: int) -> AsyncIterator[TransferProcess]:
    with tempfile.TemporaryDirectory(prefix="weir-") as directory:
        process = TransferProcess(Path(directory), lease_ttl_ms)
        try:
            await process.start()
            yield process
        finally:
            process.close()


def _start_writer(transfer: TransferProcess) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "tests.integration.arena_writer", str(transfer.socket_path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, cwd=_REPOSITORY)


def _can_make_pid_namespaces() -> bool:
    return subprocess.run([*_IN_OWN_NAMESPACE, "true"], capture_output=True, check=False).returncode == 0


async def _read_line(process: "subprocess.Popen[bytes]") -> dict[str, list[int]]:
    assert process.stdout is not None
    line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), 60)
    answer: dict[str, list[int]] = json.loads(line)
    return answer


async def test_a_stopped_worker_is_fenced_before_its_pages_are_given_on(transfer: TransferProcess) -> None:
    with _start_writer(transfer) as writer, ended(writer):
        page_ids = (await _read_line(writer))["page_ids"]
        segment = transfer.open_segment()
        generations = segment.page_rows["generation"].copy()
        before = segment.pages[page_ids].copy()
        async with asyncio.timeout(10):
            while (segment.pages[page_ids] == before).all():  # noqa: ASYNC110 - it writes from another process
                await asyncio.sleep(0.01)

        stopped_at_s = time.monotonic()
        os.kill(writer.pid, signal.SIGSTOP)
        await transfer.wait_for("free_pages", (await transfer.describe())["total_pages"])
        assert time.monotonic() - stopped_at_s >= 0.4 * _TTL_MS / 1000, "not before its time is up"
        contents = segment.pages[page_ids].copy()
        os.kill(writer.pid, signal.SIGCONT)

        assert writer.wait(timeout=10) == -signal.SIGKILL
        metrics = await transfer.describe()
        assert (metrics["fenced_total"], metrics["orphaned_total"], metrics["leases"]) == (1, 1, 0)
        assert (segment.page_rows["generation"][page_ids] == generations[page_ids] + 1).all()
        await asyncio.sleep(0.3)
        assert (segment.pages[page_ids] == contents).all()
        await _the_next_owner_is_undisturbed(transfer, page_ids)


async def _the_next_owner_is_undisturbed(transfer: TransferProcess, page_ids: list[int]) -> None:
    client = ArenaClient(
        transfer.socket_path, WorkerIdentity("next", "decode", PAGE_BYTES, MODEL_DIGEST), on_handed_off=print
    )
    await client.start()
    acquired = await client.acquire(len(page_ids), 0)
    assert sorted(acquired.page_ids) == sorted(page_ids)
    client.segment.pages[page_ids] = 0x5A
    await asyncio.sleep(0.3)
    assert (client.segment.pages[page_ids] == 0x5A).all()
    await client.close()


async def test_a_killed_worker_leaves_nothing_long_before_its_lease_would_end(
    patient_transfer: TransferProcess,
) -> None:
    with _start_writer(patient_transfer) as writer, ended(writer):
        await _read_line(writer)
        assert (await patient_transfer.describe())["leases"] == 1
        writer.kill()
        await patient_transfer.wait_for("leases", 0)
        metrics = await patient_transfer.describe()
        assert (metrics["leases"], metrics["free_pages"]) == (0, metrics["total_pages"])
        assert (metrics["fenced_total"], metrics["orphaned_total"]) == (0, 1)


async def test_the_segment_is_removed_when_the_service_ends_with_nobody_left(transfer: TransferProcess) -> None:
    assert transfer.segment_path.exists()
    assert transfer.terminate() == 0
    assert not transfer.segment_path.exists()


async def test_a_worker_in_a_pid_namespace_of_its_own_is_refused(transfer: TransferProcess) -> None:
    if not _can_make_pid_namespaces():
        pytest.skip("this user cannot make a pid namespace")
    command = [*_IN_OWN_NAMESPACE, sys.executable, "-m", "tests.integration.arena_writer", str(transfer.socket_path)]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, cwd=_REPOSITORY, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "runs in another pid namespace" in done.stderr
    assert (await transfer.describe())["leases"] == 0


def test_a_pid_means_the_same_process_only_with_its_start_time() -> None:
    with sleeping_process() as (sleeper, identity):
        handle = try_open_process(identity)
        assert handle is not None
        assert try_open_process(replace(identity, start_ticks=identity.start_ticks - 1)) is None
        handle.kill()
        assert sleeper.wait(timeout=10) == -signal.SIGKILL
        handle.kill()
        handle.close()
    assert try_open_process(identity) is None

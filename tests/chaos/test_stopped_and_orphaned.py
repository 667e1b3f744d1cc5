"""A worker that stands still loses its lease for good, and its streams go on without it; a stack whose supervisor was
killed can still be ended."""

import asyncio
import os
import signal
from pathlib import Path

import grpc
import pytest

from weir.testing.load import greedy_request, open_stub, stream
from weir.testing.stack import TINY_MODEL, Stack, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(180)]


def is_alive(pid: int) -> bool:
    """A zombie counts as dead: it writes nothing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_ready(stack: Stack) -> bool:
    return all(process.state == "ready" for process in stack.processes())


def holds_no_page(stack: Stack) -> bool:
    metrics = stack.metrics(stack.processes("transfer")[0])
    return metrics["free_pages"] + metrics["cached_pages"] == metrics["total_pages"]


async def test_a_decode_worker_stopped_beyond_its_lease_is_dead_when_it_would_wake_up(tmp_path: Path) -> None:
    with Stack(tmp_path) as stack:
        worker = stack.processes("decode")[0]
        channel, stub = open_stub(stack.grpc_address)
        async with channel:
            task = asyncio.create_task(stream(stub, greedy_request([7] * 50, max_tokens=400, ignore_eos=True)))
            await asyncio.to_thread(
                wait_until, lambda: stack.metrics(worker)["num_running"] == 1, timeout_s=60, what="it decodes"
            )
            stack.kill(worker, signal.SIGSTOP)
            record = await asyncio.wait_for(task, timeout=120)

        assert (record.code, record.num_index_errors) == (grpc.StatusCode.OK, 0), record
        assert len(record.token_ids) == 400
        assert stack.metric("gateway", "adoptions_total") == 1
        wait_until(lambda: not is_alive(worker.pid), timeout_s=30, what="the stopped worker was fenced")
        with pytest.raises(ProcessLookupError):
            os.kill(worker.pid, signal.SIGCONT)
        wait_until(
            lambda: holds_no_page(stack),
            timeout_s=60,
            what="the pages of the fenced worker are free",
        )
        assert stack.metric("transfer", "fenced_total") == 1
        wait_until(lambda: all_ready(stack), timeout_s=60, what="another decode worker has taken its place")
        assert stack.integrity_errors() == []


def test_after_kill_9_of_the_supervisor_weir_down_removes_everything(tmp_path: Path) -> None:
    stack = Stack(tmp_path, flags=TINY_MODEL)
    stack.start()
    processes = stack.processes()
    supervisor_pid = stack.status()["supervisor_pid"]
    os.kill(supervisor_pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(supervisor_pid), timeout_s=30, what="the supervisor is dead")
    assert all(is_alive(process.pid) for process in processes)

    down = stack.weir("down", "--instance", stack.instance)

    assert down.returncode == 0, down.stderr
    assert [process.name for process in processes if is_alive(process.pid)] == []
    assert list(Path("/dev/shm").glob(f"*{stack.instance}*")) == []


def test_weir_up_after_kill_9_of_the_supervisor_replaces_what_is_left(tmp_path: Path) -> None:
    stack = Stack(tmp_path, flags=TINY_MODEL)
    stack.start()
    old = stack.processes()
    os.kill(stack.status()["supervisor_pid"], signal.SIGKILL)

    stack.start()
    try:
        assert {process.pid for process in old}.isdisjoint(process.pid for process in stack.processes())
        assert [process.name for process in old if is_alive(process.pid)] == []
    finally:
        stack.stop()

"""Signals reach exactly the process that was meant."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.runtime.stacks import wait_until

from weir.core.process import ProcessIdentity, own_identity
from weir.runtime.stack.processes import Tagged, end_processes, find_tagged, is_running, send_signal, tag, try_identify

SLEEP = (sys.executable, "-S", "-E", "-c", "import time; time.sleep(60)")
DEAF = (
    sys.executable,
    "-S",
    "-E",
    "-c",
    "import signal,time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(60)",
)


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(SLEEP)
    yield process
    process.kill()
    process.wait()


def identify(process: "subprocess.Popen[bytes]") -> ProcessIdentity:
    identity = try_identify(process.pid)
    assert identity is not None
    return identity


def test_a_signal_reaches_its_process(child: "subprocess.Popen[bytes]") -> None:
    identity = identify(child)
    assert is_running(identity)
    assert send_signal(identity, signal.SIGKILL)
    child.wait(5)
    assert not is_running(identity)
    assert not send_signal(identity, signal.SIGKILL)


def test_a_later_owner_of_the_pid_is_never_signalled(child: "subprocess.Popen[bytes]") -> None:
    former = replace(identify(child), start_ticks=identify(child).start_ticks - 1)
    assert not is_running(former)
    assert not send_signal(former, signal.SIGKILL)
    assert asyncio.run(end_processes([former], term_s=1, kill_s=1)) == []
    assert child.poll() is None


def test_a_zombie_does_not_run(child: "subprocess.Popen[bytes]") -> None:
    identity = identify(child)
    os.kill(child.pid, signal.SIGKILL)
    wait_until(lambda: not is_running(identity))
    assert Path(f"/proc/{child.pid}").exists()
    assert not send_signal(identity, signal.SIGTERM)


def test_who_does_not_hear_sigterm_is_killed() -> None:
    with subprocess.Popen(DEAF, stdout=subprocess.PIPE) as deaf:
        assert deaf.stdout is not None
        deaf.stdout.readline()
        left = asyncio.run(end_processes([identify(deaf)], term_s=0.1, kill_s=5))
        assert left == []
        assert deaf.wait(5) == -signal.SIGKILL


def test_processes_of_an_instance_are_found_by_their_tag(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "ab"]
    children = [subprocess.Popen(SLEEP, env=tag(folder, own_identity())) for folder in folders]
    try:
        wait_until(lambda: [found.identity for found in find_tagged(folders[0])] == [identify(children[0])])
        wait_until(lambda: find_tagged(folders[1]) != [])
        assert find_tagged(folders[1]) == [Tagged(identify(children[1]), folders[1], own_identity())]
        assert find_tagged(tmp_path) == []
    finally:
        for child in children:
            child.kill()
            child.wait()

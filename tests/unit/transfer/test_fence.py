"""Which process a lease means: the one with its pid and its start time."""

import select
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from weir.core.process import ProcessIdentity, try_read_start_ticks
from weir_transfer.fence import try_open_process


def num_handles_of(pid: int) -> int:
    """That this process has open. Other files are opened and closed at any time by threads of tests before this one."""
    infos = []
    for path in Path("/proc/self/fdinfo").iterdir():
        with suppress(FileNotFoundError):
            infos.append(path.read_text().split())
    return sum(("Pid:", str(pid)) in pairwise(info) for info in infos)


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


@pytest.fixture
def identity(sleeper: "subprocess.Popen[bytes]") -> ProcessIdentity:
    start_ticks = try_read_start_ticks(sleeper.pid)
    assert start_ticks is not None
    return ProcessIdentity(sleeper.pid, start_ticks)


def test_a_process_is_opened_by_its_pid_and_start_time_together(identity: ProcessIdentity) -> None:
    handle = try_open_process(identity)
    assert handle is not None
    assert num_handles_of(identity.pid) == 1
    handle.close()
    assert try_open_process(replace(identity, start_ticks=identity.start_ticks - 1)) is None
    assert try_open_process(replace(identity, start_ticks=identity.start_ticks + 1)) is None
    assert num_handles_of(identity.pid) == 0


def test_an_opened_process_is_killed_and_its_exit_shows(
    sleeper: "subprocess.Popen[bytes]", identity: ProcessIdentity
) -> None:
    handle = try_open_process(identity)
    assert handle is not None
    assert select.select([handle.fileno()], [], [], 0) == ([], [], [])
    handle.kill()
    assert select.select([handle.fileno()], [], [], 10)[0] == [handle.fileno()]
    handle.kill()  # again: it is gone, which is no error
    handle.close()
    assert sleeper.wait() == -signal.SIGKILL
    assert try_open_process(identity) is None

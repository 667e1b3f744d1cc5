"""Which process a lease means: the one with its pid and its start time."""

import select
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

from weir.core.process import ProcessIdentity, own_identity, try_read_start_ticks
from weir_transfer.fence import try_open_process


def test_a_process_is_opened_by_its_pid_and_start_time_together() -> None:
    own = own_identity()
    handle = try_open_process(own)
    assert handle is not None
    handle.close()
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    assert try_open_process(replace(own, start_ticks=own.start_ticks - 1)) is None
    assert try_open_process(replace(own, start_ticks=own.start_ticks + 1)) is None
    assert len(list(Path("/proc/self/fd").iterdir())) == num_open


def test_an_opened_process_is_killed_and_its_exit_shows() -> None:
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        start_ticks = try_read_start_ticks(sleeper.pid)
        assert start_ticks is not None
        handle = try_open_process(ProcessIdentity(sleeper.pid, start_ticks))
        try:
            assert handle is not None
            assert select.select([handle.fileno()], [], [], 0) == ([], [], [])
            handle.kill()
            assert select.select([handle.fileno()], [], [], 10)[0] == [handle.fileno()]
            handle.kill()  # again: it is gone, which is no error
            handle.close()
        finally:
            sleeper.kill()
        assert sleeper.wait() == -signal.SIGKILL
    assert try_open_process(ProcessIdentity(sleeper.pid, start_ticks)) is None

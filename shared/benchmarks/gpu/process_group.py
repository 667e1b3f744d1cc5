"""Runs a command in a process group of its own, shows what it prints, and ends the whole group in time."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

_POLL_S = 0.05
_TRACEBACK_S = 3.0
"""After SIGABRT: what a Python process takes to print where each of its threads is."""
_KILL_S = 5.0
"""After SIGKILL: a process that the kernel cannot end by then is left behind."""


@dataclass(frozen=True, slots=True)
class EndedCommand:
    """How a command ended. `code` is negative for a signal, None if it was ended here: `verdict` says why."""

    verdict: str
    code: int | None
    seconds: float

    @property
    def is_crash(self) -> bool:
        return self.code is not None and self.code < 0


def run_group(
    command: Sequence[str],
    environ: Mapping[str, str],
    limit_s: float,
    on_line: Callable[[str], None],
    try_reason_to_end: Callable[[], str | None] = lambda: None,
) -> EndedCommand:
    """Until it ends, or after `limit_s`, or when there is a reason to end it.

    It then gets SIGABRT, upon which Python prints tracebacks where PYTHONFAULTHANDLER is set, and SIGKILL 3 s later.
    What the command has started and left in its group is killed too.
    """
    started_s = time.monotonic()
    process = subprocess.Popen(
        command,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    reader = threading.Thread(target=_read_lines, args=(process.stdout, on_line), daemon=True)
    reader.start()
    try:
        reason = _wait(process, started_s + limit_s, limit_s, try_reason_to_end)
        if reason is not None:
            _signal_group(process, signal.SIGABRT)
            _wait_at_most(process, _TRACEBACK_S)
    finally:
        _signal_group(process, signal.SIGKILL)
        has_ended = _wait_at_most(process, _KILL_S)
    reader.join(1.0)  # what left the group may hold the pipe open
    seconds = time.monotonic() - started_s
    if not has_ended:
        return EndedCommand(f"{reason or 'ended'}, but the kernel does not end it", None, seconds)
    if reason is not None:
        return EndedCommand(reason, None, seconds)
    return EndedCommand(_verdict(process.returncode), process.returncode, seconds)


def _wait(
    process: "subprocess.Popen[bytes]",
    ends_at_s: float,
    limit_s: float,
    try_reason_to_end: Callable[[], str | None],
) -> str | None:
    """None: it has ended by itself."""
    while process.poll() is None:
        if time.monotonic() >= ends_at_s:
            return f"ended at its limit of {limit_s:.0f} s"
        reason = try_reason_to_end()
        if reason is not None:
            return reason
        time.sleep(_POLL_S)
    return None


def _wait_at_most(process: "subprocess.Popen[bytes]", seconds: float) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
        return True
    return False


def _signal_group(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _verdict(code: int) -> str:
    if code == 0:
        return "ok"
    if code > 0:
        return f"failed with {code}"
    try:
        return f"died of {signal.Signals(-code).name}"
    except ValueError:
        return f"died of signal {-code}"


def _read_lines(stream: IO[bytes], on_line: Callable[[str], None]) -> None:
    with stream:
        for line in stream:
            on_line(line.decode(errors="replace"))

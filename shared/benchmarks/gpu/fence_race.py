"""Whether a killed process can still write to pages that others map, after the kernel has said that it is gone.

    writer                                  this process
    writes the pages without end            sees them change
                    <── SIGKILL ──
                    ── its pidfd is readable ──>
                                            copies the pages; 200 ms; copies them again: nothing may differ

Weir gives a dead worker's pages to others as soon as the pidfd says that it has exited. For memory of the host that is
enough: no thread of it runs any more. A GPU may go on with what was launched, if the driver ends its work later.
"""

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

_START_S = 15.0
_EXIT_S = 10.0
_SETTLE_S = 0.2


class WriterFailed(Exception):
    """A writer did not write, or did not end: nothing was measured."""


@dataclass(frozen=True, slots=True)
class RaceRound:
    """One writer. `num_changed_bytes`: between the exit and 200 ms later; anything but 0 is a write after the exit."""

    exit_ms: float
    num_changed_bytes: int


Snapshot = Callable[[], bytes]
StartWriter = Callable[[], "subprocess.Popen[bytes]"]
"""Of a process that writes one line to its standard output when its writes have begun."""


def race(start_writer: StartWriter, snapshot: Snapshot, num_rounds: int, max_s: float) -> Iterator[RaceRound]:
    """As many rounds as begin within `max_s`. The next writer starts while one is measured, and waits to be told.

    Raises WriterFailed.
    """
    ends_at_s = time.monotonic() + max_s
    upcoming: subprocess.Popen[bytes] | None = start_writer()
    try:
        for number in range(num_rounds):
            if upcoming is None or time.monotonic() >= ends_at_s:
                return
            writer, upcoming = upcoming, None
            try:
                _begin(writer, snapshot)
                upcoming = start_writer() if number + 1 < num_rounds else None
                yield _kill_and_look(writer, snapshot)
            finally:
                _end(writer)
    finally:
        if upcoming is not None:
            _end(upcoming)


def _begin(writer: "subprocess.Popen[bytes]", snapshot: Snapshot) -> None:
    """Tells it to write, and waits until two copies differ."""
    assert writer.stdin is not None
    assert writer.stdout is not None
    try:
        writer.stdin.write(b"go\n")
        writer.stdin.flush()
    except BrokenPipeError:
        raise WriterFailed(f"the writer has ended with {writer.wait(_EXIT_S)}; its error is above") from None
    ends_at_s = time.monotonic() + _START_S
    ready, _, _ = select.select([writer.stdout], [], [], _START_S)
    if not ready or not writer.stdout.readline():
        raise WriterFailed(f"the writer has written nothing within {_START_S:.0f} s, or has ended")
    first = snapshot()
    while snapshot() == first:
        if time.monotonic() > ends_at_s:
            raise WriterFailed(f"the pages have not changed within {_START_S:.0f} s")


def _kill_and_look(writer: "subprocess.Popen[bytes]", snapshot: Snapshot) -> RaceRound:
    pidfd = os.pidfd_open(writer.pid)
    try:
        killed_at_s = time.monotonic()
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        ready, _, _ = select.select([pidfd], [], [], _EXIT_S)
        exit_ms = 1000 * (time.monotonic() - killed_at_s)
        if not ready:
            raise WriterFailed(f"the writer has not exited {_EXIT_S:.0f} s after SIGKILL")
        first = snapshot()
        time.sleep(_SETTLE_S)
        second = snapshot()
    finally:
        os.close(pidfd)
    return RaceRound(exit_ms, int(np.count_nonzero(np.frombuffer(first, np.uint8) != np.frombuffer(second, np.uint8))))


def _end(writer: "subprocess.Popen[bytes]") -> None:
    writer.kill()
    writer.wait(_EXIT_S)
    for stream in (writer.stdin, writer.stdout):
        if stream is not None:
            stream.close()

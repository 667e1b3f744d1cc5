"""Sees and kills the processes that hold leases, by pidfd: a pid may come to mean another process, a pidfd never."""

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Protocol

from weir.core.process import ProcessIdentity, try_read_start_ticks


class ProcessHandle(Protocol):
    """One process, whatever becomes of its pid."""

    def fileno(self) -> int:
        """A descriptor that becomes readable when the process has exited: no thread of it runs any more."""
        ...

    def kill(self) -> None:
        """Asks the kernel to end it at once. The exit itself shows on `fileno`. May be called again."""
        ...

    def close(self) -> None: ...


OpenProcess = Callable[[ProcessIdentity], ProcessHandle | None]
"""None if there is no such process: it has exited, or its pid is of another pid namespace."""


class PidfdHandle:
    """By pidfd_open(2) and pidfd_send_signal(2)."""

    def __init__(self, pidfd: int) -> None:
        self._pidfd = pidfd

    def fileno(self) -> int:
        return self._pidfd

    def kill(self) -> None:
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except ProcessLookupError:
            return  # it has exited already

    def close(self) -> None:
        os.close(self._pidfd)


def try_open_process(identity: ProcessIdentity) -> PidfdHandle | None:
    """The start time is compared after the pidfd is open, so that the pid cannot change its meaning in between."""
    try:
        pidfd = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return None
    if try_read_start_ticks(identity.pid) != identity.start_ticks:
        os.close(pidfd)
        return None
    return PidfdHandle(pidfd)


class Fence:
    """The handle of each lease's process, watched by the running event loop.

    `try_open` opens a process for `watch`.
    """

    def __init__(self, try_open: OpenProcess, on_exit: Callable[[int], None]) -> None:
        self.try_open = try_open
        self._on_exit = on_exit
        self._handles: dict[int, ProcessHandle] = {}

    def watch(self, lease_id: int, handle: ProcessHandle) -> None:
        """Calls `on_exit(lease_id)` once, when the process has exited. Owns `handle` from here on."""
        self.forget(lease_id)
        self._handles[lease_id] = handle
        asyncio.get_running_loop().add_reader(handle.fileno(), self._exited, lease_id)

    def kill(self, lease_id: int) -> None:
        """Raises KeyError for a lease that is not watched: nothing else would ever notice that it is not killed."""
        self._handles[lease_id].kill()

    def forget(self, lease_id: int) -> None:
        """Watches no longer; the process lives on."""
        handle = self._handles.pop(lease_id, None)
        if handle is not None:
            asyncio.get_running_loop().remove_reader(handle.fileno())
            handle.close()

    def close(self) -> None:
        for lease_id in list(self._handles):
            self.forget(lease_id)

    def _exited(self, lease_id: int) -> None:
        self.forget(lease_id)
        self._on_exit(lease_id)

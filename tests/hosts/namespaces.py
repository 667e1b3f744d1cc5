"""Namespaces of the kernel that live as long as one process does, and other processes in them."""

import ctypes
import os
import select
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
"""Of the checkout: where commands run."""
_PROGRAMS = ("ip", "tc", "unshare", "nsenter")
_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21
_NAMESPACES = ("--net", "--mount", "--uts", "--ipc")
_TIMEOUT_S = 20.0
_LIBC = ctypes.CDLL(None, use_errno=True)  # os.setns comes with Python 3.12
_OF_THE_OUTSIDE = ("TMPDIR", "XDG_RUNTIME_DIR")
"""Variables that name folders which are not there inside."""


def why_impossible() -> str | None:
    """What is missing here to make namespaces; None where nothing is."""
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"needs {' and '.join(missing)} (Debian: iproute2, util-linux)"
    capabilities = int(Path("/proc/self/status").read_text().partition("CapEff:")[2].split()[0], 16)
    if not capabilities >> _CAP_NET_ADMIN & capabilities >> _CAP_SYS_ADMIN & 1:
        return "only root, with CAP_NET_ADMIN and CAP_SYS_ADMIN, can make namespaces"
    return None


def enter(pid: int, kind: str) -> None:
    """This thread, for good, into the namespace of that kind in which `pid` is."""
    with _opened(f"/proc/{pid}/ns/{kind}") as namespace:
        _set_namespace(namespace)


@contextmanager
def within(pid: int, kind: str) -> Iterator[None]:
    """The same for a while. Of "pid": what this thread starts meanwhile."""
    with _opened(f"/proc/thread-self/ns/{kind}") as own:
        enter(pid, kind)
        try:
            yield
        finally:
            _set_namespace(own)


@contextmanager
def _opened(path: str) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _set_namespace(descriptor: int) -> None:
    if _LIBC.setns(descriptor, 0) != 0:
        raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")


class Namespaces:
    """Network, mounts, processes, host name and IPC of their own, held by their PID 1, which does nothing. It ends when
    it is killed or when this process ends, however it does, and then the kernel ends all that is in them."""

    def __init__(self, prepare: str = "", *arguments: str) -> None:
        """`prepare`: shell commands with these arguments, which run inside first."""
        # /proc is still that of the outside when the shell reads its own number there. Orphans are nobody's to wait
        # for: the kernel forgets them where SIGCHLD is ignored, which a shell does not hand on.
        script = f"read -r pid _ < /proc/self/stat\n{prepare}\necho $pid\nexec env --ignore-signal=CHLD cat > /dev/null"
        # The outer one waits for PID 1, and must not have what is to go with it.
        command = ["unshare", "--pid", "--kill-child", "unshare", *_NAMESPACES, "sh", "-euc", script, "sh", *arguments]
        pipe = subprocess.PIPE
        self._holder = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        self._started: list[subprocess.Popen[bytes]] = []
        said = b""
        try:
            said = self._wait_prepared()
        finally:
            if not said:
                self._holder.kill()
                _, errors = self._holder.communicate(timeout=_TIMEOUT_S)
        if not said:
            raise RuntimeError(f"namespaces were not made within {_TIMEOUT_S} s: {errors.decode(errors='replace')}")
        self.pid = int(said)
        """Of PID 1, as the outside sees it."""

    def _wait_prepared(self) -> bytes:
        """Nothing where that fails or takes too long."""
        assert self._holder.stdout is not None
        ready, _, _ = select.select([self._holder.stdout], [], [], _TIMEOUT_S)
        return self._holder.stdout.readline() if ready else b""

    def popen(self, command: Sequence[str], env: Mapping[str, str] | None, **options: Any) -> "subprocess.Popen[bytes]":
        """The command in these namespaces and in the folder of the checkout, in a session of its own. Its `pid` is the
        process's own, as the outside sees it. `env` is beside the variables of this process."""
        entering = ["nsenter", f"--target={self.pid}", *_NAMESPACES, "env", f"--chdir={ROOT}", *command]
        environ = {name: value for name, value in os.environ.items() if name not in _OF_THE_OUTSIDE} | dict(env or {})
        with within(self.pid, "pid"):
            process = subprocess.Popen(entering, env=environ, start_new_session=True, **options)
        self._started = [*(other for other in self._started if other.poll() is None), process]
        return process

    def ip(self, *commands: str, tool: str = "ip") -> None:
        """Of `ip`, or `tc`, in this network. Raises RuntimeError with what it said when one fails."""
        entering = ["nsenter", f"--target={self.pid}", "--net", tool, "-batch", "-"]
        lines = "\n".join(commands)
        made = subprocess.run(entering, input=lines, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if made.returncode != 0:
            raise RuntimeError(f"{tool} failed: {made.stderr.strip()}, in:\n{lines}")

    def kill(self) -> None:
        """All of it is gone when this returns."""
        try:
            if self._holder.poll() is None:
                os.kill(self.pid, signal.SIGKILL)
            for process in self._started:  # the kernel counts those that nobody has waited for
                process.wait(_TIMEOUT_S)
        finally:
            self._holder.communicate(timeout=_TIMEOUT_S)

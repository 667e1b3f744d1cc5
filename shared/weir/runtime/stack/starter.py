"""Makes the processes of a stack: by forks while a fork server is there, else each by a start of its own."""

import asyncio
import ctypes
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Protocol

from weir.core.roles import WORKER_ROLES
from weir.runtime.stack.fork_server import MAX_MESSAGE_BYTES, ForkReply, ForkRequest, fork_server_command
from weir.runtime.stack.plan import ProcessSpec

_COMMANDS_OWN = frozenset({"WEIR_TLS_CERT", "WEIR_TLS_KEY", "WEIR_TLS_CA"})
_PR_SET_CHILD_SUBREAPER = 36
_REPLY_S = 60.0  # it imports first
_END_S = 2.0
_UNKNOWN_EXIT = 255  # as asyncio says it


class StartedProcess(Protocol):
    """A child of this process."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None:
        """Negative for a signal; None while it runs."""
        ...

    async def wait(self) -> int:
        """Its exit code."""
        ...

    def send_signal(self, number: int, /) -> None:
        """Raises ProcessLookupError if it has ended."""
        ...

    def kill(self) -> None: ...


class ProcessStarter:
    """`environ` is what every process gets, but for certificates that an operator's commands show: those are not those
    of the processes that one of them starts."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = {name: value for name, value in environ.items() if name not in _COMMANDS_OWN}
        self._server: _ForkServer | None = None

    @asynccontextmanager
    async def forking(self, specs: Sequence[ProcessSpec]) -> AsyncIterator[None]:
        """Processes are forks meanwhile, of one that has imported for workers among `specs`, which is most of what the
        others need too. Not for good: what is started again later is to run the code that is installed then.

        Orphans of this process's children become its own meanwhile.
        """
        modules = [spec.module for spec in specs if spec.role in WORKER_ROLES and spec.module is not None]
        self._server = server = await _try_open(self._environ, sorted({*modules})) if modules else None
        try:
            yield
        finally:
            self._server = None
            if server is not None:
                await server.close()

    async def start(self, spec: ProcessSpec, log: int) -> StartedProcess:
        """With a session of its own: Ctrl-C in the terminal reaches the supervisor alone, which ends things in order.
        `log`: a descriptor for all that it prints. Raises OSError, RuntimeError.
        """
        if self._server is not None and spec.module is not None:
            try:
                return await self._server.fork(spec, log)
            except ConnectionError:
                self._server = None  # the next start does without
                raise
        return await asyncio.create_subprocess_exec(
            *spec.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**self._environ, **spec.environ},
            start_new_session=True,
        )


async def _try_open(environ: Mapping[str, str], modules: list[str]) -> "_ForkServer | None":
    """None: no orphan can become this process's child, or the machine makes no process now: then each start says so."""
    if not _takes_orphans(1):
        return None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *fork_server_command(theirs.fileno(), modules),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=environ,
                start_new_session=True,
            )
    except BaseException as error:
        ours.close()
        _takes_orphans(0)
        if isinstance(error, OSError | RuntimeError):
            return None
        raise
    ours.setblocking(False)
    return _ForkServer(process, ours)


def _takes_orphans(number: int) -> bool:
    failed: int = ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, number, 0, 0, 0)
    return not failed


class _ForkServer:
    """The process of `weir.runtime.stack.fork_server`, and the connection to it."""

    def __init__(self, process: asyncio.subprocess.Process, connection: socket.socket) -> None:
        self._process = process
        self._connection = connection
        self._one_at_a_time = asyncio.Lock()

    async def fork(self, spec: ProcessSpec, log: int) -> "ForkedProcess":
        """Raises ConnectionError if the server has ended, or does not answer; OSError for what the machine refuses."""
        assert spec.module is not None
        request = ForkRequest(spec.module, list(spec.module_words), dict(spec.environ))
        async with self._one_at_a_time:
            try:
                socket.send_fds(self._connection, [request.encode()], [log])
                async with asyncio.timeout(_REPLY_S):
                    answer = await asyncio.get_running_loop().sock_recv(self._connection, MAX_MESSAGE_BYTES)
            except OSError as error:
                self._kill()
                raise ConnectionError(f"the fork server does not answer: {error!r}") from error
            except asyncio.CancelledError:
                self._hang_up()  # its late answer would be taken for that to the next request
                raise
        if not answer:
            raise ConnectionError("the fork server has ended")
        reply = ForkReply(**json.loads(answer))
        if reply.error:
            raise OSError(reply.error)
        return ForkedProcess(reply.pid)

    async def close(self) -> None:
        """It ends when nobody is connected any more; whoever waits for a fork gets ConnectionError."""
        self._hang_up()
        try:
            await asyncio.wait_for(self._process.wait(), _END_S)
        except TimeoutError:
            self._kill()
            with suppress(TimeoutError):  # it waits for something in the kernel that no signal ends
                await asyncio.wait_for(self._process.wait(), _END_S)
        finally:
            async with self._one_at_a_time:
                self._connection.close()
            _takes_orphans(0)

    def _hang_up(self) -> None:
        """What it has forked and can tell nobody, it kills."""
        with suppress(OSError):  # it is gone
            self._connection.shutdown(socket.SHUT_RDWR)

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()


class ForkedProcess:
    """A child of this process that another process has made."""

    def __init__(self, pid: int) -> None:
        """Raises OSError."""
        self.pid = pid
        self.returncode: int | None = None
        loop = asyncio.get_running_loop()
        try:
            self._descriptor = os.pidfd_open(pid)
        except OSError:  # nobody would see its end
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        self._exit_code: asyncio.Future[int] = loop.create_future()
        loop.add_reader(self._descriptor, self._on_exit)

    async def wait(self) -> int:
        return await asyncio.shield(self._exit_code)

    def send_signal(self, number: int, /) -> None:
        if self.returncode is not None:
            raise ProcessLookupError(f"process {self.pid} has ended")
        signal.pidfd_send_signal(self._descriptor, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _on_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        try:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        except ChildProcessError:  # whoever started this process ignores SIGCHLD
            self.returncode = _UNKNOWN_EXIT
        self._exit_code.set_result(self.returncode)

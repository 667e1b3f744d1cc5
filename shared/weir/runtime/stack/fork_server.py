"""`python -m weir.runtime.stack.fork_server`: has imported what the processes of a stack have in common, and becomes
each of them by a fork. Before the first worker it imports and reads what workers of that model have in common.

    supervisor ── what to run, its log ──> fork server ── fork ──> helper ── fork ──> the process
               <───────── pid ────────────               <─ pid ──  ends

The helper ends at once, and so the process becomes a child of the supervisor, which takes in orphans meanwhile.
"""

import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

TITLE_BYTES = 4096
"""Of command line, as others see it: a fork has that of its parent's start, and can write no more than that over it."""
MAX_MESSAGE_BYTES = 128 * 1024
_ARG_START, _ARG_END = 45, 46  # of /proc/self/stat, after the name
_PID_BYTES = 8


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """`python -m module words`, with `environ` over that of the fork server."""

    module: str
    words: list[str]
    environ: dict[str, str]

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True, slots=True)
class ForkReply:
    """`error`: why there is no process. Empty: there is one."""

    pid: int
    error: str

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def fork_server_command(connection: int, modules: list[str]) -> list[str]:
    """`connection`: a descriptor of its end of a pair of SOCK_SEQPACKET. `modules`: to import `__main__` of."""
    own = [sys.executable, "-m", "weir.runtime.stack.fork_server", str(connection), ",".join(modules)]
    return [*own, " " * TITLE_BYTES]


def main() -> None:
    """Returns when the supervisor has closed the connection; in each fork, when what it has become has ended."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    _set_title(sys.orig_argv[:3])
    modules = sys.argv[2].split(",")
    for module in modules:
        _import(module)
    _freeze()
    request = _serve(connection, set(modules))
    if request is not None:
        runpy.run_module(request.module, run_name="__main__", alter_sys=True)


def _import(module: str) -> ModuleType | None:
    """None: it cannot be imported, which a process that runs it says in its log."""
    name = f"{module}.__main__"
    with suppress(Exception):
        return importlib.import_module(name)
    return None


def _prepare_for(request: ForkRequest) -> None:
    """What it would import and read later by itself. What goes wrong goes wrong there too, and is in its log."""
    main = _import(request.module)
    if main is not None:
        with suppress(Exception, SystemExit):
            main.prepare_for(request.words, {**os.environ, **request.environ})
    _freeze()


def _freeze() -> None:
    """Else a fork's first full collection would copy all that was imported."""
    gc.collect()
    gc.freeze()


def _serve(connection: socket.socket, workers: set[str]) -> ForkRequest | None:
    """`workers`: their modules, none of which was told yet what to prepare for. None: in the fork server, at the end.
    Else: in a fork, as what it is to go on."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 1)
        if not message:
            return None
        request, log = ForkRequest(**json.loads(message)), descriptors[0]
        if request.module in workers:
            _prepare_for(request)
            workers.clear()
        try:
            reply = ForkReply(_fork_orphan(), "")
        except OSError as error:
            reply = ForkReply(0, str(error))
        if not reply.error and not reply.pid:
            connection.close()
            _become(request, log)
            return request
        os.close(log)
        try:
            connection.send(reply.encode())
        except OSError:  # whoever has asked is gone, or waits no more: the process is nobody's
            if reply.pid:
                os.kill(reply.pid, signal.SIGKILL)
            return None


def _fork_orphan() -> int:
    """0 in the new process, whose parent is gone; its pid in this one. Raises OSError."""
    reader, writer = os.pipe()
    helper = os.fork()
    if helper == 0:
        os.close(reader)
        pid = _fork_and_tell(writer)
        if pid:
            os._exit(0)
        return 0
    os.close(writer)
    with os.fdopen(reader, "rb") as told:
        answer = told.read(_PID_BYTES)
    os.waitpid(helper, 0)
    if len(answer) < _PID_BYTES:
        raise OSError("the machine makes no process")
    return int.from_bytes(answer, "little")


def _fork_and_tell(writer: int) -> int:
    try:
        pid = os.fork()
        if pid:
            os.write(writer, pid.to_bytes(_PID_BYTES, "little"))
    except OSError:
        os._exit(1)
    os.close(writer)
    return pid


def _become(request: ForkRequest, log: int) -> None:
    os.setsid()
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    sys.modules.pop(f"{request.module}.__main__", None)  # it is run, not imported
    os.environ.update(request.environ)
    sys.argv = [request.module, *request.words]
    _set_title([sys.executable, "-m", request.module, *request.words])


def _set_title(words: list[str]) -> None:
    """What `ps` shows from now on, as much of it as there is room for."""
    stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    fields = stat[stat.rindex(")") + 2 :].split()
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    if start:  # some sandboxes do not say
        title = "\0".join(words).encode()[: end - start - 1]
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, title, len(title))


if __name__ == "__main__":
    main()

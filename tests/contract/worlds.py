"""Two servers of the bus for one contract test: nats-server as a real process, and the in-memory hub."""

import asyncio
import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from weir.bus.in_memory import InMemoryHub
from weir.bus.nats import NatsBus
from weir.bus.protocol import Bus
from weir.bus.server import nats_server_command


async def eventually(is_so: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Raises TimeoutError when it does not become so."""
    async with asyncio.timeout(timeout_s):
        while not is_so():  # noqa: ASYNC110  what is waited for has no event
            await asyncio.sleep(0.01)


class BusWorld(Protocol):
    """Something to connect to, that can die and come back."""

    async def connect(self) -> Bus: ...

    def stop_server(self) -> None: ...

    def start_server(self) -> None: ...


class MemoryWorld:
    def __init__(self) -> None:
        self.hub = InMemoryHub()

    async def connect(self) -> Bus:
        return self.hub.connect()

    def stop_server(self) -> None:
        self.hub.stop()

    def start_server(self) -> None:
        self.hub.start()


class NatsServer:
    """A nats-server on a free port of its own, with `flags`, killed hard."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self._folder = folder
        self._flags = flags
        self._process: subprocess.Popen[bytes] | None = None
        self._port = -1

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._port}"

    def start(self) -> None:
        command = [*nats_server_command(self._port, self._folder / "store", ports_file_dir=self._folder), *self._flags]
        with (self._folder / "nats.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        ports_file = self._folder / f"nats-server_{self._process.pid}.ports"
        deadline = time.monotonic() + 10
        while not ports_file.exists() or not ports_file.read_text():
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError(f"nats-server did not start: {(self._folder / 'nats.log').read_text()}")
            time.sleep(0.01)
        self._port = int(json.loads(ports_file.read_text())["nats"][0].rsplit(":", 1)[1])

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=10)
            self._process = None

    def freeze(self) -> None:
        """It keeps its connections and answers nobody, from when this returns."""
        self._signal(signal.SIGSTOP)
        if self._process is not None:  # the kernel stops its threads one by one
            threads = Path(f"/proc/{self._process.pid}/task")
            while any(_state_of(thread) != "T" for thread in threads.iterdir()):
                time.sleep(0.001)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)


class NatsWorld:
    def __init__(self, server: NatsServer) -> None:
        self._server = server

    async def connect(self) -> Bus:
        return await NatsBus.connect(self._server.url, name="contract-test")

    def stop_server(self) -> None:
        self._server.kill()

    def start_server(self) -> None:
        self._server.start()


def _state_of(thread: Path) -> str:
    """One letter, as proc(5) has it."""
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]

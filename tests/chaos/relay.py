"""A TCP relay between a process and a server, which can cut, delay, refuse and damage what passes through it."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

from tests.chaos.stream_faults import Fault, FaultyStream, Reset, Stall, Truncate

_CHUNK_BYTES = 1 << 16
_MAX_CHUNKS = 1024
_BACKLOG = 100
_CALL_TIMEOUT_S = 10.0
_LISTENING = "0A"
_LOOPBACK = "0100007F"
Direction = Literal["to_server", "to_client"]
_BOTH: tuple[Direction, ...] = get_args(Direction)


class Relay:
    """Listens at `port` of the loopback and passes on to (host, port). Usable from any thread; has one of its own.

    cut      nothing passes any more; connections stay open, new ones are accepted, and what was sent arrives late,
             after `restore`: a network that has split; with a direction, in that one
    cut_off  the same for the connections of one process of this machine, until `rejoin`
    refuse   connections are reset, and new ones refused: a server that is gone
    delay    everything arrives so many seconds later, in order
    damage   these faults, each once, at bytes that are counted from now on over all connections of that direction
    restore  everything passes again, undamaged but for streams that have ended
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        listen_host: str = "127.0.0.1",
        listen_port: int = 0,
        enter: Callable[[], None] | None = None,
    ) -> None:
        """Listens at `listen_port`; 0: at any free one. `enter`: called first in the relay's thread, where all its
        sockets are made; another network namespace is entered so."""
        self._target = (host, port)
        self._listen_host = listen_host
        self._delay_s = 0.0
        self._listener: socket.socket | None = None
        self._serving: set[asyncio.Task[Any]] = set()
        """One for each connection, from its beginning to its end."""
        self._gates: dict[int, asyncio.Event] = {}
        """By the port of the client; closed while its process is cut off."""
        self._cut_off_pids: set[int] = set()
        self._streams: dict[Direction, FaultyStream] = {way: FaultyStream() for way in _BOTH}
        self._stalls: set[asyncio.Event] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._thread.start()
        self._is_open: dict[Direction, asyncio.Event] = {way: self._call(_made(asyncio.Event)) for way in _BOTH}
        try:
            self.port: int = self._call(self._find_port(enter, listen_port))
            self.restore()
        except OSError:
            self.close()
            raise

    @property
    def address(self) -> str:
        return f"{self._listen_host}:{self.port}"

    def cut(self, direction: Direction | None = None) -> None:
        for way in _BOTH if direction is None else (direction,):
            self._loop.call_soon_threadsafe(self._is_open[way].clear)

    def damage(self, direction: Direction, *faults: Fault) -> None:
        """Instead of those that are still to come in this direction."""
        self._call(self._damage(direction, *faults))

    def cut_off(self, pid: int) -> int:
        """Returns how many connections that were."""
        return int(self._call(self._cut_off(pid)))

    def rejoin(self, pid: int) -> None:
        self._call(self._rejoin(pid))

    def delay(self, seconds: float) -> None:
        self._delay_s = seconds

    def refuse(self) -> None:
        self._call(self._refuse())

    def restore(self) -> None:
        self._delay_s = 0.0
        self._call(self._restore())

    def close(self) -> None:
        self._call(self._refuse())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CALL_TIMEOUT_S)
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_CALL_TIMEOUT_S)

    async def _find_port(self, enter: Callable[[], None] | None, listen_port: int) -> int:
        if enter is not None:
            enter()
        with socket.socket() as probe:
            if listen_port:  # where an earlier one has listened its connections may still be known
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((self._listen_host, listen_port))
            return int(probe.getsockname()[1])

    async def _damage(self, direction: Direction, *faults: Fault) -> None:
        self._streams[direction].set_faults(*faults)

    async def _restore(self) -> None:
        for way in _BOTH:
            self._is_open[way].set()
            self._streams[way].set_faults()
        for stall in self._stalls:
            stall.set()
        if self._listener is None:
            self._listener = socket.create_server((self._listen_host, self.port), backlog=_BACKLOG)
            self._listener.setblocking(False)
            self._loop.add_reader(self._listener, self._accept, self._listener)

    def _accept(self, listener: socket.socket) -> None:
        """Not asyncio's own server: what that takes in the pass in which it is closed, nobody closes (Python 3.11)."""
        try:
            connection, _ = listener.accept()
        except OSError:  # its client has gone, or this process has no descriptor for it
            return
        serving = self._loop.create_task(self._serve(connection))
        self._serving.add(serving)

        def ended(serving: asyncio.Task[None]) -> None:
            self._serving.discard(serving)
            connection.close()  # also of a task that was cancelled before it began

        serving.add_done_callback(ended)

    async def _cut_off(self, pid: int) -> int:
        self._cut_off_pids.add(pid)
        gates = [self._gates[port] for port in tcp_ports_of(pid) if port in self._gates]
        for gate in gates:
            gate.clear()
        return len(gates)

    async def _rejoin(self, pid: int) -> None:
        self._cut_off_pids.discard(pid)
        cut_off_ports = set[int]().union(*(tcp_ports_of(other) for other in self._cut_off_pids))
        for port, gate in self._gates.items():
            if port not in cut_off_ports:
                gate.set()

    async def _refuse(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for connection in self._serving:
            connection.cancel()
        if self._serving:
            await asyncio.wait(self._serving, timeout=_CALL_TIMEOUT_S / 2)
        await asyncio.sleep(0)  # a transport that was aborted closes its socket in the next pass

    async def _serve(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            with contextlib.suppress(OSError):
                target_reader, target_writer = await asyncio.open_connection(*self._target)
                try:
                    await self._relay(reader, writer, target_reader, target_writer)
                finally:
                    target_writer.transport.abort()
        finally:
            writer.transport.abort()

    async def _relay(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        target_reader: asyncio.StreamReader,
        target_writer: asyncio.StreamWriter,
    ) -> None:
        client_port: int = writer.get_extra_info("peername")[1]
        gate = self._gates[client_port] = asyncio.Event()
        if not any(client_port in tcp_ports_of(pid) for pid in self._cut_off_pids):
            gate.set()
        pumps = {
            asyncio.create_task(self._pump(reader, target_writer, gate, "to_server")),
            asyncio.create_task(self._pump(target_reader, writer, gate, "to_client")),
        }
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.wait(pumps)
            if self._gates.get(client_port) is gate:
                del self._gates[client_port]

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event, way: Direction
    ) -> None:
        """Ends when either side does."""
        chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MAX_CHUNKS)
        passing = asyncio.create_task(self._pass_on(chunks, writer, gate, way))
        try:
            with contextlib.suppress(OSError):
                while chunk := await reader.read(_CHUNK_BYTES):
                    await chunks.put((self._loop.time() + self._delay_s, chunk))
                    if passing.done():
                        return
                await chunks.put((self._loop.time() + self._delay_s, b""))
                await asyncio.wait([passing])
        finally:
            passing.cancel()
            await asyncio.wait([passing])

    async def _pass_on(
        self,
        chunks: asyncio.Queue[tuple[float, bytes]],
        writer: asyncio.StreamWriter,
        gate: asyncio.Event,
        way: Direction,
    ) -> None:
        writer.transport.set_write_buffer_limits(high=0)  # what is drained is the kernel's, and outlives an abort
        is_truncated = False
        with contextlib.suppress(OSError):
            while True:
                due_at_s, chunk = await chunks.get()
                await asyncio.sleep(max(0.0, due_at_s - self._loop.time()))
                await self._is_open[way].wait()
                await gate.wait()
                if not chunk:
                    return
                for piece, ending in () if is_truncated else self._streams[way].take(chunk):
                    writer.write(piece)
                    await writer.drain()
                    if isinstance(ending, Stall):
                        await self._stall()
                    elif isinstance(ending, Reset):
                        writer.transport.abort()  # the other pump of this connection sees it, and ends both
                        return
                    elif isinstance(ending, Truncate):
                        writer.write_eof()
                        is_truncated = True
                        break

    async def _stall(self) -> None:
        restored = asyncio.Event()
        self._stalls.add(restored)
        try:
            await restored.wait()
        finally:
            self._stalls.discard(restored)

    def __enter__(self) -> "Relay":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def tcp_ports_of(pid: int, *, listening: bool = False) -> set[int]:
    """Local ports of the process's TCP sockets: of its connections, or those at which it listens on 127.0.0.1. Empty if
    it is gone."""
    inodes = sockets_of(pid)
    ports = set()
    for table in ("tcp", "tcp6"):  # gRPC's are IPv4 in IPv6
        try:
            lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:] if inodes else []
        except OSError:  # it is gone, or about to: then reading gives EINVAL
            return set()
        for fields in map(str.split, lines):
            address, _, port = fields[1].partition(":")
            is_wanted = not listening or (fields[3] == _LISTENING and address.endswith(_LOOPBACK))
            if is_wanted and fields[9] in inodes:
                ports.add(int(port, 16))
    return ports


def sockets_of(pid: int) -> set[str]:
    """Inode numbers, as /proc/net/tcp has them; empty if it is gone."""
    inodes = set()
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                target = str(descriptor.readlink())
                if target.startswith("socket:["):
                    inodes.add(target[len("socket:[") : -1])
    return inodes


async def _made(kind: type[asyncio.Event]) -> asyncio.Event:
    return kind()

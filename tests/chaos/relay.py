"""A TCP relay between a process and a server, which can cut, delay and refuse what passes through it."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any

_CHUNK_BYTES = 1 << 16
_MAX_CHUNKS = 1024
_CALL_TIMEOUT_S = 10.0


class Relay:
    """Listens at `port` of the loopback and passes on to (host, port). Usable from any thread; has one of its own.

    cut      nothing passes any more; connections stay open, new ones are accepted, and what was sent arrives late,
             after `restore`: a network that has split
    refuse   connections are reset, and new ones refused: a server that is gone
    delay    everything arrives so many seconds later, in order
    restore  everything passes again
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._delay_s = 0.0
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._thread.start()
        self._is_open = self._call(_made(asyncio.Event))
        self.restore()

    def cut(self) -> None:
        self._loop.call_soon_threadsafe(self._is_open.clear)

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

    async def _restore(self) -> None:
        self._is_open.set()
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def _refuse(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in self._connections:
            writer.transport.abort()
        for pump in self._pumps:
            pump.cancel()
        if self._pumps:
            await asyncio.wait(self._pumps, timeout=_CALL_TIMEOUT_S / 2)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            target_reader, target_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        self._connections |= {writer, target_writer}
        pumps = {
            asyncio.create_task(self._pump(reader, target_writer)),
            asyncio.create_task(self._pump(target_reader, writer)),
        }
        self._pumps |= pumps
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.wait(pumps)
            self._pumps -= pumps
            self._connections -= {writer, target_writer}
            writer.transport.abort()
            target_writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Ends when either side does."""
        chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MAX_CHUNKS)
        passing = asyncio.create_task(self._pass_on(chunks, writer))
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

    async def _pass_on(self, chunks: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while True:
                due_at_s, chunk = await chunks.get()
                await asyncio.sleep(max(0.0, due_at_s - self._loop.time()))
                await self._is_open.wait()
                if not chunk:
                    return
                writer.write(chunk)
                await writer.drain()

    def __enter__(self) -> "Relay":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def _made(kind: type[asyncio.Event]) -> asyncio.Event:
    return kind()

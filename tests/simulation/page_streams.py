"""Page streams over the simulated network: TCP as `weir.kv.movers.pipes` sees it, and what can become of its bytes.

Bytes go in pieces, mostly less than a page, each with a delay of its own, in order; a sender waits where too many are
unread. So a page is half there for a while, and everything can happen meanwhile.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.simulation.loop import PROCESS, SimProcess
from tests.simulation.network import Connection, Network
from tests.simulation.threads import SimThread, SimThreads
from weir.core.addresses import split_port
from weir.kv.movers.listener import DEFAULT_IDLE_S
from weir.kv.movers.pipes import Buffer, PipeEnded
from weir.kv.movers.source import PageSource

_STREAMS_PORT = 7000
_WINDOW_BYTES = 768
_LONGEST_PIECE_BYTES = 100
_PAUSES = 0.2
"""Probability of a moment between two pieces, in which their sender can die."""


class PageTraffic:
    """What all page streams of a world share, and where faults reach them."""

    def __init__(self, network: Network, threads: SimThreads, rng: random.Random) -> None:
        self.network = network
        self.threads = threads
        self.rng = rng
        self.on_written: Callable[[SimProcess, memoryview], None] = lambda process, memory: None
        """Of bytes that came, where they lie now."""
        self.faults: deque[tuple[int, Callable[[Connection, bytes], bytes]]] = deque()
        """Each strikes the piece of that number, counted from when the one before it struck, and says what is sent in
        its place."""

    def pass_on(self, connection: Connection, piece: bytes) -> bytes:
        if not self.faults:
            return piece
        num_before, strike = self.faults.popleft()
        if num_before:
            self.faults.appendleft((num_before - 1, strike))
            return piece
        return strike(connection, piece)


class SimPipe:
    """`weir.kv.movers.pipes.PagePipe`: one end of a connection. Whoever sends is another thread than who ends it."""

    def __init__(self, traffic: PageTraffic, idle_s: float) -> None:
        self._traffic = traffic
        self._idle_s = idle_s
        self._process = PROCESS.get()
        self._incoming = bytearray()
        self._num_unread = 0
        """Bytes that the other end has not taken."""
        self.is_open = False
        self._is_over = False
        self._waiting: tuple[SimThread, Callable[[], None]] | None = None
        self.connection: Connection | None = None
        self.send_piece: Callable[[bytes], None] = lambda piece: None
        self.send_room: Callable[[int], None] = lambda num_bytes: None
        self.close_connection: Callable[[], None] = lambda: None

    def send(self, buffers: Sequence[Buffer]) -> None:
        for piece in self._pieces(buffers):
            while self._num_unread and self._num_unread + len(piece) > _WINDOW_BYTES:
                self._wait("nothing could be sent")
            if self._is_over:
                raise PipeEnded("the connection is closed")
            self._num_unread += len(piece)
            assert self.connection is not None
            self.send_piece(self._traffic.pass_on(self.connection, piece))
            if self._traffic.rng.random() < _PAUSES:
                self._traffic.threads.require_current().wait(self._traffic.threads.draw_wake_s())

    def receive(self, *buffers: memoryview) -> None:
        for buffer in buffers:
            left = buffer
            while left:
                while not self._incoming:
                    self._wait("nothing came")
                piece = bytes(self._incoming[: len(left)])
                del self._incoming[: len(piece)]
                left[: len(piece)] = piece
                self._traffic.on_written(self._process, left[: len(piece)])
                left = left[len(piece) :]
                self.send_room(len(piece))

    def end(self) -> None:
        self._incoming.clear()
        self.on_closed()
        self.close_connection()

    def close(self) -> None:
        self.end()

    def wait_open(self, timeout_s: float) -> None:
        """Raises OSError."""
        while not self.is_open:
            self._wait("nobody answered", timeout_s)

    # What the network does.

    def on_open(self) -> None:
        self.is_open = True
        self._wake()

    def on_piece(self, piece: bytes) -> None:
        if not self._is_over:
            self._incoming += piece
            self._wake()

    def on_room(self, num_bytes: int) -> None:
        self._num_unread -= num_bytes
        self._wake()

    def on_closed(self) -> None:
        self._is_over = True
        self._wake()

    def _pieces(self, buffers: Sequence[Buffer]) -> Iterator[bytes]:
        """Each is read when it goes."""
        for buffer in buffers:
            left = memoryview(buffer)
            while left:
                num_bytes = self._traffic.rng.randrange(1, _LONGEST_PIECE_BYTES + 1)
                yield bytes(left[:num_bytes])
                left = left[num_bytes:]

    def _wait(self, what: str, longest_s: float | None = None) -> None:
        """For the other end. Raises PipeEnded."""
        longest_s = self._idle_s if longest_s is None else longest_s
        if self._is_over:
            raise PipeEnded("the other end closed the connection")
        thread = self._traffic.threads.require_current()
        self._waiting = thread, thread.waker()
        if not thread.wait(longest_s):
            raise PipeEnded(f"{what} for {longest_s:g} s")

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting[1]()


class SimPageStreams:
    """`weir_transfer.exchange.page_streams.PageStreams` of the process that makes it."""

    def __init__(self, traffic: PageTraffic, host: str, source: PageSource) -> None:
        self.process = PROCESS.get()
        self._traffic = traffic
        self._source = source
        self._address = f"{host}:{_STREAMS_PORT}"
        self._pipes: dict[Connection, SimPipe] = {}
        self._is_closed = False
        traffic.network.listen(self._address, self)

    @property
    def port(self) -> int:
        return split_port(self._address)[1]

    def connect(self, host: str, port: int, timeout_s: float) -> SimPipe:
        pipe = SimPipe(self._traffic, DEFAULT_IDLE_S)
        connection = pipe.connection = self._traffic.network.connect(f"{host}:{port}", pipe.on_closed)
        if connection is None:
            self._traffic.threads.require_current().wait(self._traffic.network.draw_delay_s())
            raise ConnectionRefusedError(f"nobody listens at {host}:{port}")
        pipe.send_piece = lambda piece: connection.send_frame(("piece", piece))
        pipe.send_room = lambda num_bytes: connection.send_frame(("room", num_bytes))
        pipe.close_connection = connection.close_client
        connection.send_frame(("open", pipe))
        try:
            pipe.wait_open(timeout_s)
        except PipeEnded:
            pipe.end()
            raise
        return pipe

    def close(self) -> None:
        self._is_closed = True
        self._traffic.network.close_listener(self._address, self)
        for pipe in list(self._pipes.values()):
            pipe.end()

    # What the network does.

    def on_connected(self, connection: Connection) -> None:
        if self._is_closed:
            connection.close_server()

    def on_frame(self, connection: Connection, frame: Any) -> None:
        kind, body = frame
        if kind == "open":
            self._open(connection, body)
        elif connection in self._pipes:
            pipe = self._pipes[connection]
            (pipe.on_piece if kind == "piece" else pipe.on_room)(body)

    def on_closed(self, connection: Connection) -> None:
        pipe = self._pipes.pop(connection, None)
        if pipe is not None:
            pipe.on_closed()

    def _open(self, connection: Connection, client: SimPipe) -> None:
        pipe = self._pipes[connection] = SimPipe(self._traffic, DEFAULT_IDLE_S)
        pipe.connection = connection
        pipe.send_piece = lambda piece: connection.to_client.send(client.on_piece, piece)
        pipe.send_room = lambda num_bytes: connection.to_client.send(client.on_room, num_bytes)
        pipe.close_connection = connection.close_server
        connection.to_client.send(client.on_open)
        self._traffic.threads.Thread(target=self._serve, args=(pipe,)).start()

    def _serve(self, pipe: SimPipe) -> None:
        try:
            self._source.serve(pipe)
        finally:
            pipe.close()

"""The network between processes: connections with TCP's promises (in order, without gaps), and what can become of them.

A direction delays; blocked, it holds what is sent until it is open again, as TCP repeats it. Keep-alive notices what is
blocked for long, each side by itself. A cut connection drops what is under way, and each side learns of it later.
"""

import asyncio
import random
from collections.abc import Callable
from typing import Any, Protocol

from tests.simulation.loop import PROCESS, SimLoop, SimProcess
from weir.rpc.identities import Party

_APART_S = 1e-9
"""Between two frames of a connection: timers of one time fire in any order."""
_KEEPALIVE_S = (4.0, 7.5)
"""From the last sign of life to the verdict (`weir.rpc.channel`)."""


class Listener(Protocol):
    """A server, as the network sees it."""

    process: SimProcess

    def on_connected(self, connection: "Connection") -> None: ...

    def on_frame(self, connection: "Connection", frame: Any) -> None: ...

    def on_closed(self, connection: "Connection") -> None: ...


class Direction:
    """One way of a connection."""

    def __init__(self, network: "Network", sender: SimProcess, receiver: SimProcess) -> None:
        self._network = network
        self._pair = (sender, receiver)
        self._last_s = 0.0
        self._held: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self.is_cut = False

    @property
    def is_blocked(self) -> bool:
        return self._pair in self._network.blocked

    def send(self, deliver: Callable[..., object], *args: Any) -> None:
        if self.is_cut:
            return
        if self.is_blocked:
            self._held.append((deliver, args))
            return
        loop = self._network.loop
        at_s = self._last_s = max(self._last_s + _APART_S, loop.time() + self._network.draw_delay_s())
        loop.call_at(at_s, self._arrive, deliver, args, context=self._pair[1].context)

    def open(self) -> None:
        held, self._held = self._held, []
        for deliver, args in held:
            self.send(deliver, *args)

    def _arrive(self, deliver: Callable[..., object], args: tuple[Any, ...]) -> None:
        if not self.is_cut:
            deliver(*args)


class Connection:
    """Between a client's channel and a server. Each side is closed for itself."""

    def __init__(self, network: "Network", client: SimProcess, server: Listener, on_closed: Callable[[], None]) -> None:
        self._network = network
        self.client = client
        self.server = server
        self._on_client_closed = on_closed
        self.to_server = Direction(network, client, server.process)
        self.to_client = Direction(network, server.process, client)
        self.is_client_closed = False
        self.is_server_closed = False
        self.to_server.send(server.on_connected, self)

    @property
    def processes(self) -> tuple[SimProcess, SimProcess]:
        return self.client, self.server.process

    @property
    def is_silent(self) -> bool:
        """A ping would not come back now."""
        return self.to_server.is_blocked or self.to_client.is_blocked or any(one.is_stopped for one in self.processes)

    def send_frame(self, frame: Any) -> None:
        self.to_server.send(self._arrive_at_server, frame)

    def close_client(self, *, tell: bool = True) -> None:
        """The client's side ends here; the server learns of it when that arrives."""
        if self.is_client_closed:
            return
        self.is_client_closed = True
        self._network.forget(self)
        if tell:
            self.to_server.send(self.close_server)
        self._on_client_closed()

    def close_server(self, *, tell: bool = True) -> None:
        if self.is_server_closed:
            return
        self.is_server_closed = True
        if tell:
            self.to_client.send(self.close_client)
        self.server.on_closed(self)

    def cut(self) -> None:
        """What is under way is lost; each side learns of it at a time of its own."""
        self.to_server.is_cut = self.to_client.is_cut = True
        network = self._network
        network.post(self.client, network.draw_notice_s(), lambda: self.close_client(tell=False))
        network.post(self.server.process, network.draw_notice_s(), lambda: self.close_server(tell=False))

    def watch(self) -> None:
        """As keep-alive does, from when it may have become silent."""
        for process, close in ((self.client, self.close_client), (self.server.process, self.close_server)):
            self._network.post(process, self._network.rng.uniform(*_KEEPALIVE_S), self._check_alive, close)

    def _check_alive(self, close: Callable[[], None]) -> None:
        if self.is_silent:
            close()

    def _arrive_at_server(self, frame: Any) -> None:
        if not self.is_server_closed:
            self.server.on_frame(self, frame)


class Network:
    """Who listens where, who is connected, and who cannot reach whom now."""

    def __init__(self, loop: SimLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self.longest_delay_s = 0.001
        self.blocked: set[tuple[SimProcess, SimProcess]] = set()
        self.unreached: set[SimProcess] = set()
        """Those to whom a way was blocked at some time: to whoever sent, they seemed not to read."""
        self.lost_answers = 0.0
        """Probability that a unary call happens and its answer does not arrive."""
        self.num_lost_answers = 0
        self._listeners: dict[str, Listener] = {}
        self._connections: dict[Connection, None] = {}

    def draw_delay_s(self) -> float:
        return 0.00005 + self.rng.random() * self.longest_delay_s

    def draw_notice_s(self) -> float:
        """Until a side learns that its connection was cut: mostly at once, sometimes by keep-alive."""
        return self.rng.uniform(*_KEEPALIVE_S) if self.rng.random() < 0.2 else self.draw_delay_s()

    def draw_is_answer_lost(self) -> bool:
        is_lost = self.lost_answers > 0 and self.rng.random() < self.lost_answers
        self.num_lost_answers += is_lost
        return is_lost

    def post(self, process: SimProcess, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """Has the process do it, if it lives then."""
        self.loop.call_later(delay_s, call, *args, context=process.context)

    def listen(self, address: str, server: Listener) -> None:
        self._listeners[address] = server
        server.process.on_death.append(lambda: self.close_listener(address, server))

    def close_listener(self, address: str, server: Listener) -> None:
        if self._listeners.get(address) is server:
            del self._listeners[address]

    def try_find(self, address: str) -> Listener | None:
        return self._listeners.get(address)

    def connect(self, address: str, on_closed: Callable[[], None]) -> Connection | None:
        """None: nobody listens there."""
        server = self.try_find(address)
        if server is None:
            return None
        connection = Connection(self, PROCESS.get(), server, on_closed)
        self._connections[connection] = None
        if connection.is_silent:
            connection.watch()
        return connection

    def forget(self, connection: Connection) -> None:
        self._connections.pop(connection, None)

    def connections_of(self, process: SimProcess) -> list[Connection]:
        return [one for one in self._connections if process in one.processes]

    @property
    def connections(self) -> list[Connection]:
        """Those that something could still happen to."""
        return [
            one
            for one in self._connections
            if not one.to_server.is_cut and not any(process.is_dead for process in one.processes)
        ]

    def end_process(self, process: SimProcess) -> None:
        """Its kernel closes what it had open. What it had sent before arrives."""
        for connection in self.connections_of(process):
            if connection.client is process:
                connection.is_client_closed = True
                connection.to_server.send(connection.close_server)
            else:
                connection.is_server_closed = True
                connection.to_client.send(connection.close_client)
            if all(one.is_dead for one in connection.processes):
                self.forget(connection)

    def on_stopped(self, process: SimProcess) -> None:
        for connection in self.connections_of(process):
            connection.watch()

    def block(self, sender: SimProcess, receiver: SimProcess) -> None:
        self.blocked.add((sender, receiver))
        self.unreached.add(receiver)
        for connection in self.connections_of(sender):
            if receiver in connection.processes:
                connection.watch()

    def unblock(self, sender: SimProcess, receiver: SimProcess) -> None:
        self.blocked.discard((sender, receiver))
        for connection in self.connections_of(sender):
            connection.to_server.open()
            connection.to_client.open()

    def heal(self) -> None:
        for pair in list(self.blocked):
            self.unblock(*pair)
        self.lost_answers = 0.0
        self.longest_delay_s = 0.001


class SimDialer:
    """`weir.rpc.channel.Dialer` over this network. `make_channel` is grpc.aio's channel in it."""

    def __init__(self, network: Network, make_channel: Callable[[Network, str], Any]) -> None:
        self._network = network
        self._make_channel = make_channel

    version = 0
    """There are no certificates here."""

    def open(self, address: str, party: Party) -> Any:
        del party
        return self._make_channel(self._network, address)

    async def is_refused(self, address: str, timeout_s: float) -> bool:
        server, me = self._network.try_find(address), PROCESS.get()
        is_blocked = server is not None and not {(me, server.process), (server.process, me)}.isdisjoint(
            self._network.blocked
        )
        await asyncio.sleep(timeout_s if is_blocked else self._network.draw_delay_s())
        return server is None

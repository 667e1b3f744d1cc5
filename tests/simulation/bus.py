"""NATS as its clients see it: every connection in order, messages lost where a connection breaks or the server goes,
answers that do not come, watches that begin again after a reconnect. It repeats nothing and overtakes nothing within a
connection, as NATS does not.
"""

import asyncio
import logging
import random
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from tests.simulation.bus_buckets import SimBucket, SimWatch
from tests.simulation.loop import PROCESS, SimLoop, SimProcess
from weir.bus.in_memory_kv import BucketState
from weir.bus.protocol import (
    BucketMissing,
    BusMessage,
    BusTimeout,
    BusUnavailable,
    Headers,
    MessageHandler,
    NoResponder,
)
from weir.core.tasks import end_tasks

_log = logging.getLogger(__name__)
_KV_TIMEOUT_S = 5.0
_RECONNECT_S = 0.2
_APART_S = 1e-9
"""Between two messages of a connection: timers of one time fire in any order."""


_NOBODY = SimProcess("nats", 0)
"""In whose context the server does what it does."""


class SimHub:
    """The server. What it holds is its own; each client's connection may be away for itself."""

    def __init__(self, loop: SimLoop, rng: random.Random) -> None:
        self.loop = loop
        self._rng = rng
        self.longest_delay_s = 0.001
        self.lost = 0.0
        """Probability that a message is lost on one of its ways."""
        self.num_lost = 0
        self.is_up = True
        self.buses: list[SimBus] = []
        self.buckets: dict[str, tuple[BucketState, list[SimWatch]]] = {}

    def connect(self) -> "SimBus":
        if not self.is_up:
            raise BusUnavailable("the server is away")
        bus = SimBus(self, PROCESS.get())
        self.buses.append(bus)
        return bus

    def draw_delay_s(self) -> float:
        return 0.00005 + self._rng.random() * self.longest_delay_s

    def draw_is_lost(self) -> bool:
        is_lost = self.lost > 0 and self._rng.random() < self.lost
        self.num_lost += is_lost
        return is_lost

    def stop(self) -> None:
        self.is_up = False
        for bus in list(self.buses):
            bus.lose_connection()
        for state, _ in self.buckets.values():
            if not state.is_durable:
                state.clear()

    def start(self) -> None:
        self.is_up = True
        for bus in list(self.buses):
            bus.reconnect_later()

    def end_process(self, process: SimProcess) -> None:
        for bus in [one for one in self.buses if one.process is process]:
            self.forget(bus)

    def forget(self, bus: "SimBus") -> None:
        if bus in self.buses:
            self.buses.remove(bus)
        bus.term += 1
        for _, watches in self.buckets.values():
            watches[:] = [one for one in watches if one.bus is not bus]

    def bucket(self, name: str, make: Callable[[], BucketState]) -> tuple[BucketState, list["SimWatch"]]:
        if name not in self.buckets:
            self.buckets[name] = make(), []
        return self.buckets[name]

    def route(self, message: BusMessage, answer: Callable[[bytes], None] | None) -> int:
        """At the server. Returns how many listen."""
        found = [(bus, one) for bus in self.buses if bus.is_at_server for one in bus.listeners(message.subject)]
        for bus, subscription in found:
            if not self.draw_is_lost():
                bus.receive(subscription.deliver, message, answer)
        return len(found)

    def heal(self) -> None:
        self.lost, self.longest_delay_s = 0.0, 0.001


class SimSubscription:
    """One handler with its bounded queue."""

    def __init__(self, bus: "SimBus", subject: str, handler: MessageHandler, max_pending: int) -> None:
        self._bus = bus
        self._subject = subject
        self._handler = handler
        self._max_pending = max_pending
        self._waiting: deque[tuple[BusMessage, Callable[[bytes], None] | None]] = deque()
        self._news = asyncio.Event()
        self.num_dropped = 0
        self._task = asyncio.create_task(self._handle_all())

    @property
    def num_pending(self) -> int:
        return len(self._waiting)

    def deliver(self, message: BusMessage, answer: Callable[[bytes], None] | None) -> None:
        if len(self._waiting) >= self._max_pending:
            self.num_dropped += 1
            return
        self._waiting.append((message, answer))
        self._news.set()

    async def close(self) -> None:
        self._bus.unsubscribe(self._subject, self)
        await end_tasks([self._task])

    async def _handle_all(self) -> None:
        while True:
            while not self._waiting:
                self._news.clear()
                await self._news.wait()
            message, answer = self._waiting.popleft()
            try:
                payload = await self._handler(message)
            except Exception:  # noqa: BLE001 - as NATS' client: the boundary to what a handler does
                _log.exception("handler of %s failed", message.subject)
                continue
            if payload is not None and answer is not None:
                answer(payload)


class SimBus:
    """`weir.bus.protocol.Bus`: one connection of one process."""

    def __init__(self, hub: SimHub, process: SimProcess) -> None:
        self._hub = hub
        self.process = process
        self._subscriptions: defaultdict[str, list[SimSubscription]] = defaultdict(list)
        self.is_connected = True
        """As the client knows."""
        self.is_at_server = True
        self.is_closed = False
        self.is_held_off = False
        """Its way to the server is closed."""
        self.term = 0
        """Of the connection: what was under way in an earlier one is lost."""
        self._last_s = [0.0, 0.0]

    def listeners(self, subject: str) -> list[SimSubscription]:
        return self._subscriptions.get(subject, [])

    def lose_connection(self) -> None:
        """The server's side is gone at once; the client notices soon."""
        if not self.is_at_server:
            return
        self.is_at_server = False
        self.term += 1
        self._hub.loop.call_later(self._hub.draw_delay_s(), self._notice, context=self.process.context)

    def hold_off(self) -> None:
        self.is_held_off = True
        self.lose_connection()

    def let_back(self) -> None:
        self.is_held_off = False
        self.reconnect_later()

    def reconnect_later(self) -> None:
        delay_s = _RECONNECT_S * (0.5 + self._hub.draw_delay_s() / self._hub.longest_delay_s)
        self._hub.loop.call_later(delay_s, self._reconnect, context=self.process.context)

    def _notice(self) -> None:
        if not self.is_at_server:
            self.is_connected = False

    def _reconnect(self) -> None:
        if self.is_at_server or self.is_closed or self.is_held_off or not self._hub.is_up:
            return
        self.is_connected = self.is_at_server = True
        for state, watches in self._hub.buckets.values():
            for watch in watches:
                if watch.bus is self:
                    watch.begin_again(state)

    def _check(self) -> None:
        if not self.is_connected or self.is_closed:
            raise BusUnavailable("not connected to the server")

    def send(self, at_server: Callable[..., object], *args: Any) -> None:
        """In order, unless the connection breaks before it arrives. The server's side runs in nobody's context."""
        self._travel(0, _NOBODY, at_server, args)

    def receive(self, at_client: Callable[..., None], *args: Any) -> None:
        self._travel(1, self.process, at_client, args)

    def _travel(self, way: int, whose: SimProcess, arrive: Callable[..., object], args: tuple[Any, ...]) -> None:
        if not self.is_at_server:
            return
        loop, term = self._hub.loop, self.term
        at_s = self._last_s[way] = max(self._last_s[way] + _APART_S, loop.time() + self._hub.draw_delay_s())

        def arrived() -> None:
            if self.term == term:
                arrive(*args)

        loop.call_at(at_s, arrived, context=whose.context)

    async def publish(self, subject: str, payload: bytes, headers: Headers | None = None) -> None:
        self._check()
        if not self._hub.draw_is_lost():
            self.send(self._hub.route, BusMessage(subject, payload, dict(headers or {})), None)

    async def request(
        self, subject: str, payload: bytes, *, timeout_s: float, headers: Headers | None = None
    ) -> BusMessage:
        self._check()
        message = BusMessage(subject, payload, dict(headers or {}))
        answered: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()

        def settle(reply: bytes | None) -> None:
            if not answered.done():
                answered.set_result(reply)

        def ask() -> None:
            if self._hub.route(message, answer) == 0:
                self.receive(settle, None)

        def answer(reply: bytes) -> None:
            sender = PROCESS.get()
            bus = next((one for one in self._hub.buses if one.process is sender and one.is_at_server), None)
            if bus is not None and not self._hub.draw_is_lost():
                bus.send(self.receive, settle, reply)

        if not self._hub.draw_is_lost():
            self.send(ask)
        try:
            async with asyncio.timeout(timeout_s):
                reply = await answered
        except TimeoutError as error:
            raise BusTimeout(f"no answer on {subject} within {timeout_s} s") from error
        if reply is None:
            raise NoResponder(f"nobody listens on {subject}")
        return BusMessage(subject, reply)

    async def subscribe(self, subject: str, handler: MessageHandler, *, max_pending: int = 4096) -> SimSubscription:
        subscription = SimSubscription(self, subject, handler, max_pending)
        self._subscriptions[subject].append(subscription)
        return subscription

    def unsubscribe(self, subject: str, subscription: SimSubscription) -> None:
        if subscription in self._subscriptions[subject]:
            self._subscriptions[subject].remove(subscription)

    async def bucket(
        self,
        name: str,
        *,
        ttl_s: float | None = None,
        durable: bool = False,
        max_bytes: int | None = None,
        max_entries: int | None = None,
    ) -> "SimBucket":
        loop = self._hub.loop
        state, watches = await self.ask_server(
            lambda: self._hub.bucket(name, lambda: BucketState(loop, ttl_s, durable, max_bytes, max_entries))
        )
        return SimBucket(self, state, watches)

    async def open_bucket(self, name: str) -> "SimBucket":
        def find() -> tuple[BucketState, list[SimWatch]]:
            if name not in self._hub.buckets:
                raise BucketMissing(f"bucket {name} is not there: the scheduler that leads makes it")
            return self._hub.buckets[name]

        state, watches = await self.ask_server(find)
        return SimBucket(self, state, watches)

    async def ask_server(self, do: Callable[[], Any]) -> Any:
        """Done at the server, or not; done, and the answer lost: nobody here knows."""
        self._check()
        answered: asyncio.Future[tuple[Any, BaseException | None]] = asyncio.get_running_loop().create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if not answered.done():
                answered.set_result((result, error))

        def at_server() -> None:
            try:
                result, error = do(), None
            except Exception as raised:  # noqa: BLE001 - the server's answer
                result, error = None, raised
            if not self._hub.draw_is_lost():
                self.receive(settle, result, error)

        if not self._hub.draw_is_lost():
            self.send(at_server)
        try:
            async with asyncio.timeout(_KV_TIMEOUT_S):
                result, error = await answered
        except TimeoutError as late:
            raise BusTimeout(f"no answer within {_KV_TIMEOUT_S} s") from late
        if error is not None:
            raise error
        return result

    async def close(self) -> None:
        self.is_closed = True
        self._hub.forget(self)
        for subscriptions in list(self._subscriptions.values()):
            for subscription in list(subscriptions):
                await subscription.close()

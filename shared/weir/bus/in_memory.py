"""The bus without a server: every process of a test in one event loop, with faults on demand."""

import asyncio
import logging
import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from weir.bus.in_memory_kv import BucketState, InMemoryBucket
from weir.bus.protocol import (
    BucketMissing,
    BusMessage,
    BusTimeout,
    BusUnavailable,
    Headers,
    MessageHandler,
    NoResponder,
)
from weir.core.clock import Clock, SystemClock
from weir.core.tasks import end_tasks

logger = logging.getLogger(__name__)

_Answer = Callable[[bytes], None]


class Leg(Enum):
    """Which way a message goes."""

    THERE = "there"
    BACK = "back"


Fate = Sequence[float]
"""One delay in seconds for each copy that arrives. (0.0,): at once and once; (): lost; (0.0, 0.0): twice."""

ARRIVES: Fate = (0.0,)
LOST: Fate = ()
REPEATED: Fate = (0.0, 0.0)


class Faults(Protocol):
    """Decides about each message as it is sent."""

    def fate_of(self, subject: str, leg: Leg) -> Fate: ...


class ScriptedFaults:
    """The next messages of a subject suffer what was scripted, in order; then all goes well again."""

    def __init__(self) -> None:
        self._scripts: defaultdict[tuple[str, Leg], deque[Fate]] = defaultdict(deque)

    def script(self, subject: str, *fates: Fate, leg: Leg = Leg.THERE) -> None:
        """`leg` BACK: the answers to requests on `subject`."""
        self._scripts[subject, leg].extend(fates)

    def fate_of(self, subject: str, leg: Leg) -> Fate:
        scripted = self._scripts[subject, leg]
        return scripted.popleft() if scripted else ARRIVES


class RandomFaults:
    """Each message is lost, repeated or delayed (up to `max_delay_s`) with the given probabilities."""

    def __init__(self, seed: int, *, lost: float, repeated: float, delayed: float, max_delay_s: float) -> None:
        if lost + repeated + delayed > 1:
            raise ValueError(f"probabilities add up to {lost + repeated + delayed}, at most 1")
        self._random = random.Random(seed)
        self._lost = lost
        self._repeated = repeated
        self._delayed = delayed
        self._max_delay_s = max_delay_s

    def fate_of(self, subject: str, leg: Leg) -> Fate:
        fate = self._random.random()
        delay_s = self._random.random() * self._max_delay_s
        if fate < self._lost:
            return LOST
        if fate < self._lost + self._repeated:
            return (0.0, delay_s)
        if fate < self._lost + self._repeated + self._delayed:
            return (delay_s,)
        return ARRIVES


@dataclass(frozen=True, slots=True)
class _Delivery:
    message: BusMessage
    answer: _Answer | None


class InMemorySubscription:
    """One handler with its bounded queue."""

    def __init__(self, handler: MessageHandler, max_pending: int, on_close: Callable[["InMemorySubscription"], None]):
        self._handler = handler
        self._queue: asyncio.Queue[_Delivery] = asyncio.Queue(max_pending)
        self._on_close = on_close
        self._num_dropped = 0
        self._task = asyncio.create_task(self._handle_all())

    @property
    def num_dropped(self) -> int:
        return self._num_dropped

    @property
    def num_pending(self) -> int:
        return self._queue.qsize()

    def deliver(self, delivery: _Delivery) -> None:
        try:
            self._queue.put_nowait(delivery)
        except asyncio.QueueFull:
            self._num_dropped += 1

    async def close(self) -> None:
        self._on_close(self)
        await end_tasks([self._task])

    async def _handle_all(self) -> None:
        while True:
            delivery = await self._queue.get()
            try:
                payload = await self._handler(delivery.message)
            except Exception:  # the boundary between the bus and whatever a handler does
                logger.exception("handler of %s failed", delivery.message.subject)
                continue
            if payload is not None and delivery.answer is not None:
                delivery.answer(payload)


class InMemoryHub:
    """Stands for the server. Faults strike what passes through it; `clock` drives the expiry of bucket entries."""

    def __init__(self, *, clock: Clock | None = None, faults: Faults | None = None) -> None:
        self._clock = clock or SystemClock()
        self._faults = faults or ScriptedFaults()
        self._buses: list[InMemoryBus] = []
        self._buckets: dict[str, BucketState] = {}
        self._is_up = True

    @property
    def is_up(self) -> bool:
        return self._is_up

    def connect(self) -> "InMemoryBus":
        bus = InMemoryBus(self)
        self._buses.append(bus)
        return bus

    def stop(self) -> None:
        """As if the server died: everybody is disconnected, and what was not durable is gone."""
        self._is_up = False
        for state in self._buckets.values():
            if not state.is_durable:
                state.clear()

    def start(self) -> None:
        """As if the server came back."""
        self._is_up = True
        for state in self._buckets.values():
            state.send_everything_again()

    def bucket_state(
        self, name: str, ttl_s: float | None, durable: bool, max_bytes: int | None, max_entries: int | None
    ) -> BucketState:
        if name not in self._buckets:
            self._buckets[name] = BucketState(self._clock, ttl_s, durable, max_bytes, max_entries)
        return self._buckets[name]

    def find_bucket(self, name: str) -> BucketState:
        """Raises BucketMissing."""
        if name not in self._buckets:
            raise BucketMissing(f"bucket {name} is not there")
        return self._buckets[name]

    def forget(self, bus: "InMemoryBus") -> None:
        if bus in self._buses:
            self._buses.remove(bus)

    def route(self, message: BusMessage, answer: _Answer | None) -> int:
        """Sends the message to every subscriber, as the faults will have it; returns how many there are."""
        subscriptions = [subscription for bus in self._buses for subscription in bus.listeners(message.subject)]
        for delay_s in self._faults.fate_of(message.subject, Leg.THERE) if subscriptions else ():
            for subscription in subscriptions:
                _after(delay_s, subscription.deliver, _Delivery(message, self._faulty(message.subject, answer)))
        return len(subscriptions)

    def _faulty(self, subject: str, answer: _Answer | None) -> _Answer | None:
        if answer is None:
            return None

        def answer_with_faults(payload: bytes) -> None:
            for delay_s in self._faults.fate_of(subject, Leg.BACK) if self._is_up else ():
                _after(delay_s, answer, payload)

        return answer_with_faults


class InMemoryBus:
    """One client of a hub; can be cut off alone."""

    def __init__(self, hub: InMemoryHub) -> None:
        self._hub = hub
        self._listeners: defaultdict[str, list[InMemorySubscription]] = defaultdict(list)
        self._is_cut_off = False
        self._is_closed = False

    @property
    def is_connected(self) -> bool:
        return self._hub.is_up and not self._is_cut_off and not self._is_closed

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def cut_off(self) -> None:
        """Loses the connection of this client alone."""
        self._is_cut_off = True

    def reconnect(self) -> None:
        self._is_cut_off = False

    def listeners(self, subject: str) -> list[InMemorySubscription]:
        return list(self._listeners.get(subject, ())) if self.is_connected else []

    def check_connected(self) -> None:
        if not self.is_connected:
            raise BusUnavailable("not connected to the in-memory hub")

    async def publish(self, subject: str, payload: bytes, headers: Headers | None = None) -> None:
        self.check_connected()
        self._hub.route(BusMessage(subject, payload, dict(headers or {})), None)

    async def request(
        self, subject: str, payload: bytes, *, timeout_s: float, headers: Headers | None = None
    ) -> BusMessage:
        self.check_connected()
        answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def answer(reply: bytes) -> None:
            if not answered.done() and self.is_connected:
                answered.set_result(reply)

        if self._hub.route(BusMessage(subject, payload, dict(headers or {})), answer) == 0:
            raise NoResponder(f"nobody listens on {subject}")
        try:
            async with asyncio.timeout(timeout_s):
                return BusMessage(subject, await answered)
        except TimeoutError as error:
            raise BusTimeout(f"no answer on {subject} within {timeout_s} s") from error

    async def subscribe(
        self, subject: str, handler: MessageHandler, *, max_pending: int = 4096
    ) -> InMemorySubscription:
        subscription = InMemorySubscription(handler, max_pending, self._listeners[subject].remove)
        self._listeners[subject].append(subscription)
        return subscription

    async def bucket(
        self,
        name: str,
        *,
        ttl_s: float | None = None,
        durable: bool = False,
        max_bytes: int | None = None,
        max_entries: int | None = None,
    ) -> InMemoryBucket:
        self.check_connected()
        return InMemoryBucket(self, self._hub.bucket_state(name, ttl_s, durable, max_bytes, max_entries))

    async def open_bucket(self, name: str) -> InMemoryBucket:
        self.check_connected()
        return InMemoryBucket(self, self._hub.find_bucket(name))

    async def close(self) -> None:
        self._is_closed = True
        self._hub.forget(self)
        for subscriptions in list(self._listeners.values()):
            for subscription in list(subscriptions):
                await subscription.close()


def _after(delay_s: float, call: Callable[..., None], *arguments: object) -> None:
    if delay_s == 0:
        call(*arguments)
    else:
        asyncio.get_running_loop().call_later(delay_s, call, *arguments)

"""Key-value buckets of the simulated NATS: every call may have happened although its answer is lost."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from weir.bus.in_memory_kv import BucketState
from weir.bus.protocol import KeyConflict, KvEntry, check_key


class AskedServer(Protocol):
    """The connection that a bucket is used over."""

    @property
    def is_closed(self) -> bool: ...

    def send(self, at_server: Callable[..., object], *args: Any) -> None: ...

    def receive(self, at_client: Callable[..., None], *args: Any) -> None: ...

    async def ask_server(self, do: Callable[[], Any]) -> Any: ...


class SimBucket:
    """`weir.bus.protocol.KvBucket`."""

    def __init__(self, bus: AskedServer, state: BucketState, watches: list["SimWatch"]) -> None:
        self._bus = bus
        self._state = state
        self._watches = watches

    async def put(self, key: str, value: bytes) -> int:
        check_key(key)
        revision: int = await self._bus.ask_server(lambda: self._put(key, value))
        return revision

    async def update(self, key: str, value: bytes, *, revision: int) -> int:
        def compare_and_set() -> int:
            present = self._state.try_get(key)
            present_revision = present.revision if present else 0
            if present_revision != revision:
                raise KeyConflict(f"key {key} is at revision {present_revision}, not {revision}")
            return self._put(key, value)

        new_revision: int = await self._bus.ask_server(compare_and_set)
        return new_revision

    async def get(self, key: str) -> KvEntry | None:
        check_key(key)
        entry: KvEntry | None = await self._bus.ask_server(lambda: self._state.try_get(key))
        return entry

    async def delete(self, key: str) -> None:
        await self._bus.ask_server(lambda: self._put(key, None))

    async def list_entries(self) -> list[KvEntry]:
        entries: list[KvEntry] = await self._bus.ask_server(self._state.present)
        return [entry for entry in entries if entry.value is not None]

    async def watch(self) -> AsyncIterator[KvEntry]:
        watch = SimWatch(self._bus)
        self._watches.append(watch)
        self._bus.send(watch.begin_again, self._state)
        try:
            while not self._bus.is_closed:
                yield await watch.next()
        finally:
            if watch in self._watches:
                self._watches.remove(watch)

    def _put(self, key: str, value: bytes | None) -> int:
        revision = self._state.put(key, value)
        for watch in self._watches:
            watch.tell(KvEntry(key, value, revision))
        return revision


class SimWatch:
    """What one watcher is still to be told."""

    def __init__(self, bus: AskedServer) -> None:
        self.bus = bus
        self._waiting: deque[KvEntry] = deque()
        self._news = asyncio.Event()

    def begin_again(self, state: BucketState) -> None:
        for entry in state.present():
            self.tell(entry)

    def tell(self, entry: KvEntry) -> None:
        self.bus.receive(self._take, entry)

    async def next(self) -> KvEntry:
        while not self._waiting:
            self._news.clear()
            await self._news.wait()
        return self._waiting.popleft()

    def _take(self, entry: KvEntry) -> None:
        self._waiting.append(entry)
        self._news.set()

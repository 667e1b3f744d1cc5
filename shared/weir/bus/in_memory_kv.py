"""Buckets of the bus without a server."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from weir.bus.protocol import BucketFull, KeyConflict, KvEntry, check_key
from weir.core.clock import Clock


class HubConnection(Protocol):
    """What a bucket needs of its bus."""

    @property
    def is_connected(self) -> bool: ...

    @property
    def is_closed(self) -> bool: ...

    def check_connected(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Stored:
    entry: KvEntry
    """Its value is None where the key was deleted."""
    expires_at_s: float


class BucketState:
    """The entries of one bucket, on the hub's side."""

    def __init__(
        self,
        clock: Clock,
        ttl_s: float | None,
        is_durable: bool,
        max_bytes: int | None,
        max_entries: int | None = None,
    ) -> None:
        self.is_durable = is_durable
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._clock = clock
        self._ttl_s = ttl_s
        self._stored: dict[str, _Stored] = {}
        self._revision = 0
        self.generation = 0
        """Rises when watchers must be sent everything again."""

    def put(self, key: str, value: bytes | None) -> int:
        check_key(key)
        if self._max_entries is None and value and self._is_over(len(key) + len(value)):
            raise BucketFull(f"the bucket holds its {self._max_bytes} bytes")
        self._revision += 1
        expires_at_s = self._clock.now_s() + self._ttl_s if self._ttl_s is not None else float("inf")
        self._stored[key] = _Stored(KvEntry(key, value, self._revision), expires_at_s)
        if self._max_entries is not None:
            for entry in self.present():
                if len(self._stored) <= self._max_entries and not self._is_over(0):
                    break
                del self._stored[entry.key]
        return self._revision

    def present(self) -> list[KvEntry]:
        """Entries that have not expired, oldest change first, deletions among them."""
        now_s = self._clock.now_s()
        self._stored = {key: stored for key, stored in self._stored.items() if stored.expires_at_s > now_s}
        return sorted((stored.entry for stored in self._stored.values()), key=lambda entry: entry.revision)

    def try_get(self, key: str) -> KvEntry | None:
        stored = self._stored.get(key)
        if stored is None or stored.entry.value is None or stored.expires_at_s <= self._clock.now_s():
            return None
        return stored.entry

    def _is_over(self, num_new_bytes: int) -> bool:
        num_bytes = sum(len(entry.key) + len(entry.value or b"") for entry in self.present())
        return self._max_bytes is not None and num_bytes + num_new_bytes > self._max_bytes

    def clear(self) -> None:
        self._stored.clear()
        self._revision = 0

    def send_everything_again(self) -> None:
        self.generation += 1


class InMemoryBucket:
    """One client's view of a bucket."""

    def __init__(self, connection: HubConnection, state: BucketState) -> None:
        self._connection = connection
        self._state = state

    async def put(self, key: str, value: bytes) -> int:
        self._connection.check_connected()
        return self._state.put(key, value)

    async def update(self, key: str, value: bytes, *, revision: int) -> int:
        self._connection.check_connected()
        present = self._state.try_get(key)
        present_revision = present.revision if present else 0
        if present_revision != revision:
            raise KeyConflict(f"key {key} is at revision {present_revision}, not {revision}")
        return self._state.put(key, value)

    async def get(self, key: str) -> KvEntry | None:
        self._connection.check_connected()
        check_key(key)
        return self._state.try_get(key)

    async def delete(self, key: str) -> None:
        self._connection.check_connected()
        self._state.put(key, None)

    async def list_entries(self) -> list[KvEntry]:
        self._connection.check_connected()
        return [entry for entry in self._state.present() if entry.value is not None]

    async def watch(self) -> AsyncIterator[KvEntry]:
        """Looks at the state again and again, so nothing is missed; a fake may poll."""
        sent_revision = 0
        was_connected = True
        generation = self._state.generation
        while not self._connection.is_closed:
            is_connected = self._connection.is_connected
            if is_connected and (not was_connected or self._state.generation != generation):
                sent_revision, generation = 0, self._state.generation
            was_connected = is_connected
            for entry in self._state.present() if is_connected else ():
                if entry.revision > sent_revision:
                    sent_revision = entry.revision
                    yield entry
            await asyncio.sleep(0.005)

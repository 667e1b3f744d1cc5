"""What a bus can do. Delivery is at most once: a message can be lost, and a repeated or late one must do no harm."""

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

Headers = Mapping[str, str]


class BusError(Exception):
    """Base of the errors below."""


class BusTimeout(BusError):
    """No answer came in time: the message, or its answer, may or may not have arrived."""


class NoResponder(BusError):
    """Nobody listens on the subject."""


class BusUnavailable(BusError):
    """No connection to the server now; the bus goes on trying to reconnect."""


class BusRefused(BusError):
    """The server is there and does not do this: the account is at a limit, say."""


class BucketMismatch(BusError):
    """The bucket was made by another version of Weir: it is neither read nor written."""


class BucketMissing(BusError):
    """The bucket is not there: its maker has not made it yet, or it was lost and is not made again yet."""


class BucketFull(BusError):
    """The bucket has reached its `max_bytes`; what expires makes room."""


class KeyConflict(BusError):
    """The key was changed by somebody else since the revision that was named."""


@dataclass(frozen=True, slots=True)
class BusMessage:
    """One message as it arrived."""

    subject: str
    payload: bytes
    headers: Headers = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KvEntry:
    """One value of a bucket. `value` is None where a watch shows that the key was deleted."""

    key: str
    value: bytes | None
    revision: int


_KEY = re.compile(r"[A-Za-z0-9_=/-]+(\.[A-Za-z0-9_=/-]+)*")


def check_key(key: str) -> None:
    """Raises ValueError for a key of a bucket that no server would take."""
    if not _KEY.fullmatch(key):
        raise ValueError(f"key {key!r}: use characters of A-Z a-z 0-9 _ = / - and single dots inside")


MessageHandler = Callable[[BusMessage], Awaitable[bytes | None]]
"""Returns the answer to a request, or None for no answer. An exception is logged and counted, and nothing is sent."""


class Subscription(Protocol):
    """A running subscription. Its queue is bounded; what did not fit is dropped and counted."""

    @property
    def num_dropped(self) -> int: ...

    @property
    def num_pending(self) -> int: ...

    async def close(self) -> None: ...


class KvBucket(Protocol):
    """A key-value bucket. Entries vanish `ttl_s` after their last put; no watch shows that.

    Every method may raise BusTimeout, BusUnavailable, BusRefused or BucketMissing, and ValueError for a key that
    `check_key` refuses.
    """

    async def put(self, key: str, value: bytes) -> int:
        """Returns the new revision."""
        ...

    async def update(self, key: str, value: bytes, *, revision: int) -> int:
        """Compare and set; revision 0 means that the key must not exist. Raises KeyConflict."""
        ...

    async def get(self, key: str) -> KvEntry | None: ...

    async def delete(self, key: str) -> None: ...

    async def list_entries(self) -> list[KvEntry]: ...

    def watch(self) -> AsyncIterator[KvEntry]:
        """First every present entry, then every change, until the iterator or the bus is closed.

        Survives reconnects; after one, every present entry comes again. Of several quick changes to one key, only
        the last may come.
        """
        ...


class Bus(Protocol):
    """A connection to one server (or to one fake). Lost, it is sought again for ever; subscriptions come back with it.

    While it is lost, calls fail with BusUnavailable at once: nothing is kept to be sent later.
    """

    @property
    def is_connected(self) -> bool: ...

    async def publish(self, subject: str, payload: bytes, headers: Headers | None = None) -> None:
        """Raises BusUnavailable."""
        ...

    async def request(
        self, subject: str, payload: bytes, *, timeout_s: float, headers: Headers | None = None
    ) -> BusMessage:
        """Raises BusTimeout, NoResponder or BusUnavailable."""
        ...

    async def subscribe(self, subject: str, handler: MessageHandler, *, max_pending: int = 4096) -> Subscription:
        """Calls `handler` for one message at a time, in order of arrival. Subjects have no wildcards.

        Works while disconnected: the subscription begins with the connection. Just after a reconnect others may find
        NoResponder for a moment.
        """
        ...

    async def bucket(
        self,
        name: str,
        *,
        ttl_s: float | None = None,
        durable: bool = False,
        max_bytes: int | None = None,
        max_entries: int | None = None,
    ) -> KvBucket:
        """Opens the bucket, making it if need be, as schedulers alone may; one that exists keeps the `ttl_s` and bounds
        that it was made with. What goes over `max_bytes`, of keys, values, and what a server keeps beside them, raises
        BucketFull. With `max_entries` it does not: over either bound the entries that were put longest ago are dropped,
        and no watch shows that.

        The entries of a bucket that is not durable are gone when the server restarts; it is then made anew by itself.
        """
        ...

    async def open_bucket(self, name: str) -> KvBucket:
        """Opens a bucket that another process makes. Raises BucketMissing, as its methods do once it is gone; its
        watches wait for it."""
        ...

    async def close(self) -> None: ...

"""Buckets of the NATS bus: JetStream key-value stores."""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, TypeVar

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext, api
from nats.js.kv import KV_OP, KeyValue

from weir.bus.codec import WIRE_VERSION
from weir.bus.protocol import BucketMismatch, BucketMissing, BusError, KeyConflict, KvEntry, check_key
from weir.bus.subjects import entries_of, stream_of

logger = logging.getLogger(__name__)

MAX_BYTES_EXCEEDED = 10077
"""JetStream's number of that error."""
_STREAM_NAME_IN_USE = 10058
_DESCRIPTION = "Weir, wire version "
_MAX_FEED_ENTRIES = 16_384
_FEED_CHECK_S = 5.0
_FEED_RETRY_S = 0.25
_LIST_TIMEOUT_S = 2.0
_LIST_LOOK_S = 0.25
_DUPLICATES_S = 120.0
"""The client's own for its buckets."""

ResultT = TypeVar("ResultT")


class WatchFeed:
    """Changes of one bucket as one consumer delivers them; stale when some may have been missed."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._entries: deque[KvEntry] = deque()
        self._changed = asyncio.Event()
        self._next_sequence = 1
        self.is_stale = False

    def mark_stale(self) -> None:
        self.is_stale = True
        self._changed.set()

    async def on_message(self, message: Msg) -> None:
        sequence = message.metadata.sequence
        if sequence.consumer != self._next_sequence or len(self._entries) >= _MAX_FEED_ENTRIES:
            self.mark_stale()
            return
        self._next_sequence += 1
        is_deletion = KV_OP in (message.headers or {})
        key = message.subject.removeprefix(self._prefix)
        self._entries.append(KvEntry(key, None if is_deletion else message.data, sequence.stream))
        self._changed.set()

    def try_take(self) -> KvEntry | None:
        return self._entries.popleft() if self._entries else None

    async def wait_for_change(self) -> bool:
        """False: nothing came for a while, so that the consumer's life should be checked."""
        try:
            async with asyncio.timeout(_FEED_CHECK_S):
                await self._changed.wait()
        except TimeoutError:
            return False
        self._changed.clear()
        return True


class JetStreamConnection(Protocol):
    """What a bucket needs of its bus."""

    @property
    def is_closed(self) -> bool: ...

    def mapped_errors(self, subject: str) -> AbstractContextManager[None]: ...

    def add_feed(self, feed: WatchFeed) -> None: ...

    def remove_feed(self, feed: WatchFeed) -> None: ...


class BucketForm(NamedTuple):
    """What a bucket is made with."""

    ttl_s: float | None
    is_durable: bool
    max_bytes: int | None
    max_entries: int | None
    num_replicas: int = 1
    """Servers of a cluster that have it."""

    def config(self, bucket: str) -> api.KeyValueConfig:
        """Of one that refuses what it has no room for."""
        return api.KeyValueConfig(
            bucket=bucket,
            description=f"{_DESCRIPTION}{WIRE_VERSION}",
            history=1,
            ttl=self.ttl_s,
            max_bytes=self.max_bytes,
            storage=self._storage,
            replicas=self.num_replicas,
        )

    @property
    def _storage(self) -> api.StorageType:
        return api.StorageType.FILE if self.is_durable else api.StorageType.MEMORY

    def stream(self, name: str, subject: str) -> api.StreamConfig:
        """Of a bucket that drops its oldest entries: the stream that the client makes of one, but for that."""
        return api.StreamConfig(
            name=name,
            description=f"{_DESCRIPTION}{WIRE_VERSION}",
            subjects=[subject],
            allow_rollup_hdrs=True,
            deny_delete=True,
            discard=api.DiscardPolicy.OLD,
            duplicate_window=min(self.ttl_s or _DUPLICATES_S, _DUPLICATES_S),
            max_age=self.ttl_s,
            max_bytes=self.max_bytes,
            max_msgs=self.max_entries,
            max_msgs_per_subject=1,
            storage=self._storage,
            num_replicas=self.num_replicas,
        )


class NatsBucket:
    """Made anew by its maker whenever the server turns out to have forgotten it."""

    def __init__(
        self,
        jetstream: JetStreamContext,
        connection: JetStreamConnection,
        name: str,
        form: BucketForm | None,
    ) -> None:
        """`form` None: another process makes it."""
        self._jetstream = jetstream
        self._connection = connection
        self._name = name
        self._form = form
        self._stream = stream_of(name)
        self._entries = entries_of(name)
        self._prefix = self._entries.removesuffix(">")

    async def open(self) -> KeyValue:
        """Makes the bucket unless it is there or another process makes it. Raises BucketMismatch for one of another
        version, BucketMissing."""
        with self._connection.mapped_errors(self._name):
            try:
                if self._form is not None:
                    await self._create(self._form)
                    return self._store()
            except nats.js.errors.BadRequestError as error:
                if error.err_code != _STREAM_NAME_IN_USE:
                    raise
            try:
                found = await self._jetstream.stream_info(self._stream)
            except nats.js.errors.NotFoundError as error:
                raise BucketMissing(f"bucket {self._name} is not there: the scheduler that leads makes it") from error
            _check_version(self._name, found.config.description or "")
            return self._store()

    async def _create(self, form: BucketForm) -> None:
        if form.max_entries is None:
            await self._jetstream.create_key_value(form.config(self._name))
        else:
            await self._jetstream.add_stream(form.stream(self._stream, self._entries))

    async def put(self, key: str, value: bytes) -> int:
        check_key(key)
        return await self._run(lambda store: store.put(key, value))

    async def update(self, key: str, value: bytes, *, revision: int) -> int:
        check_key(key)
        try:
            if revision == 0:
                return await self._run(lambda store: store.create(key, value))
            return await self._run(lambda store: store.update(key, value, last=revision))
        except nats.js.errors.KeyWrongLastSequenceError as error:
            raise KeyConflict(f"key {key} is not at revision {revision}") from error

    async def get(self, key: str) -> KvEntry | None:
        check_key(key)
        try:
            entry = await self._run(lambda store: store.get(key))
        except nats.js.errors.KeyNotFoundError:
            return None
        return KvEntry(key, entry.value or b"", entry.revision or 0)

    async def delete(self, key: str) -> None:
        check_key(key)
        await self._run(lambda store: store.delete(key))

    async def list_entries(self) -> list[KvEntry]:
        return await self._run(lambda _: self._list_entries())

    async def _list_entries(self) -> list[KvEntry]:
        """By a consumer of its own: the client's watchers call a bucket empty if the news that all
        was sent comes before its entries."""
        messages: list[Msg] = []
        async with asyncio.timeout(_LIST_TIMEOUT_S):
            consumer = await self._jetstream.subscribe(self._entries, stream=self._stream, config=_newest_of_each_key())
            try:
                is_more = await _is_more_to_come(consumer, 0)
                while is_more:
                    try:
                        messages.append(await consumer.next_msg(timeout=_LIST_LOOK_S))
                        is_more = messages[-1].metadata.num_pending > 0
                    except nats.errors.TimeoutError:  # what was to come may have been removed meanwhile
                        is_more = await _is_more_to_come(consumer, len(messages))
            finally:
                await _unsubscribe(consumer)
        entries = (self._entry(message) for message in messages if KV_OP not in (message.headers or {}))
        return list(entries)

    def _entry(self, message: Msg) -> KvEntry:
        return KvEntry(message.subject.removeprefix(self._prefix), message.data, message.metadata.sequence.stream)

    async def watch(self) -> AsyncIterator[KvEntry]:
        while not self._connection.is_closed:
            feed = WatchFeed(self._prefix)
            self._connection.add_feed(feed)
            try:
                consumer = await self._try_open(feed)
                if consumer is None:
                    await asyncio.sleep(_FEED_RETRY_S)
                    continue
                try:
                    async for entry in self._drain(feed, consumer):
                        yield entry
                finally:
                    await _unsubscribe(consumer)
            finally:
                self._connection.remove_feed(feed)

    async def _drain(self, feed: WatchFeed, consumer: JetStreamContext.PushSubscription) -> AsyncIterator[KvEntry]:
        """Ends when the feed is stale."""
        while not feed.is_stale:
            while (entry := feed.try_take()) is not None:
                yield entry
            if not feed.is_stale and not await feed.wait_for_change() and not await self._is_alive(consumer):
                return

    async def _try_open(self, feed: WatchFeed) -> JetStreamContext.PushSubscription | None:
        """None: not now."""
        try:
            await self.open()
            with self._connection.mapped_errors(self._name):
                return await self._jetstream.subscribe(
                    self._entries, stream=self._stream, cb=feed.on_message, config=_newest_of_each_key()
                )
        except (BusError, nats.js.errors.Error) as error:
            logger.debug("watching bucket %s: %s; trying again", self._name, error)
            return None

    async def _is_alive(self, consumer: JetStreamContext.PushSubscription) -> bool:
        try:
            with self._connection.mapped_errors(self._name):
                await consumer.consumer_info()
        except nats.js.errors.NotFoundError:
            return False
        except BusError:
            # Not known now: a reconnect marks the feed stale, and the next look comes by itself.
            return True
        return True

    async def _run(self, operation: Callable[[KeyValue], Awaitable[ResultT]]) -> ResultT:
        store = self._store()
        try:
            with self._connection.mapped_errors(self._name):
                return await operation(store)
        except (nats.js.errors.NoStreamResponseError, nats.js.errors.NotFoundError) as error:
            if isinstance(error, nats.js.errors.KeyNotFoundError):
                raise
            if self._form is not None:
                logger.info("bucket %s is gone, as after a restart of the server; making it again", self._name)
            store = await self.open()
            with self._connection.mapped_errors(self._name):
                return await operation(store)

    def _store(self) -> KeyValue:
        return KeyValue(self._name, self._stream, self._prefix, self._jetstream, False)


def _check_version(name: str, description: str) -> None:
    """What was made without a description is of before there were several versions."""
    version = description.removeprefix(_DESCRIPTION)
    if description.startswith(_DESCRIPTION) and version != WIRE_VERSION:
        raise BucketMismatch(
            f"bucket {name} is of wire version {version[:32]!r}, this process speaks {WIRE_VERSION!r}: all processes "
            "of an instance must be of one version of Weir. Give this one another --instance; or, if nothing of that "
            f"version runs any more, remove the bucket (`nats kv rm {name}`)"
        )


def _newest_of_each_key() -> api.ConsumerConfig:
    """Named, since a client asks for one with a name on a subject that also names what the consumer reads, which a
    server can allow or not; a name that nobody guesses, so that nobody changes it."""
    return api.ConsumerConfig(
        name=secrets.token_hex(16),
        deliver_policy=api.DeliverPolicy.LAST_PER_SUBJECT,
        ack_policy=api.AckPolicy.NONE,
        inactive_threshold=60,
        mem_storage=True,
    )


async def _is_more_to_come(consumer: JetStreamContext.PushSubscription, num_received: int) -> bool:
    """Of what was there when the server was asked."""
    info = await consumer.consumer_info()
    num_delivered = info.delivered.consumer_seq if info.delivered is not None else 0
    return bool(info.num_pending) or num_delivered > num_received


async def _unsubscribe(consumer: JetStreamContext.PushSubscription) -> None:
    try:
        await consumer.unsubscribe()
    except (nats.errors.ConnectionClosedError, nats.errors.BadSubscriptionError):
        logger.debug("the consumer was closed already")

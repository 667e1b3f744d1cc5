"""The bus over a NATS server."""

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as ClientSubscription

from weir.bus.nats_kv import MAX_BYTES_EXCEEDED, BucketForm, NatsBucket, WatchFeed
from weir.bus.protocol import (
    BucketFull,
    BusError,
    BusMessage,
    BusRefused,
    BusTimeout,
    BusUnavailable,
    Headers,
    MessageHandler,
    NoResponder,
)
from weir.core.credentials import masked_url

logger = logging.getLogger(__name__)

_RECONNECT_WAIT_S = 0.25
_FLUSH_TIMEOUT_S = 2
_TLS = "tls://"
_PING_INTERVAL_S = 2
"""With two pings outstanding, a server that hangs without closing its socket is known after about 6 s."""


class NatsSubscription:
    """One handler with its bounded queue."""

    def __init__(
        self, subscription: ClientSubscription, unsubscribe: Callable[[ClientSubscription], Awaitable[None]]
    ) -> None:
        self._subscription = subscription
        self._unsubscribe = unsubscribe
        self._num_dropped = 0

    @property
    def num_dropped(self) -> int:
        return self._num_dropped

    @property
    def num_pending(self) -> int:
        return self._subscription.pending_msgs

    def count_drop(self) -> None:
        self._num_dropped += 1

    async def close(self) -> None:
        await self._unsubscribe(self._subscription)


class _TlsClient(Client):
    """Says nothing to a server that offers no TLS, where the library would go on without: whoever stands between could
    leave the offer out."""

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if initial_connection and not info.get("tls_required"):
            raise nats.errors.Error("the server offers no TLS")
        await super()._process_info(info, initial_connection=initial_connection)


class NatsBus:
    """A connection that comes back by itself for ever; made with `connect`."""

    def __init__(self, client: Client, url: str, num_replicas: int = 1) -> None:
        self._client = client
        self._num_replicas = num_replicas
        self._shown_url = masked_url(url)
        self._subscriptions: dict[ClientSubscription, NatsSubscription] = {}
        self._feeds: set[WatchFeed] = set()
        self._last_error = "it does not answer"

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        name: str,
        timeout_s: float = 10.0,
        seed_file: str = "",
        ca_file: str = "",
        inbox: str = "_INBOX",
        num_replicas: int = 1,
    ) -> "NatsBus":
        """Raises BusUnavailable when no server answers in time. `name` is what the server's monitoring shows;
        `seed_file` has the seed of the NKEY that proves who this is, empty: none does. `ca_file` has the authorities
        that the server's certificate may be of, for tls:// and nats://; empty: for tls:// those of the system. `inbox`
        begins the subjects of answers to it, `Subjects.inbox` where the server knows roles. `num_replicas`: servers of
        a cluster that have each bucket that it makes."""
        if seed_file:
            _check_seed(seed_file)
        client = _TlsClient() if ca_file or url.startswith(_TLS) else Client()
        bus = cls(client, url, num_replicas)
        connecting = client.connect(
            servers=[url],
            name=name,
            nkeys_seed=seed_file or None,
            inbox_prefix=inbox,
            tls=_tls_context(ca_file) if ca_file else None,
            error_cb=bus._on_error,
            disconnected_cb=bus._on_disconnected,
            reconnected_cb=bus._on_reconnected,
            connect_timeout=2,
            reconnect_time_wait=_RECONNECT_WAIT_S,  # type: ignore[arg-type]  # a float works; the stub says int
            max_reconnect_attempts=-1,
            ping_interval=_PING_INTERVAL_S,
            max_outstanding_pings=2,
        )
        try:
            await asyncio.wait_for(connecting, timeout_s)
        except TimeoutError as error:
            await client.close()
            raise BusUnavailable(
                f"no connection to a NATS server at {bus._shown_url} within {timeout_s} s ({bus._last_error}); is one "
                "running there, and does it take these credentials?"
            ) from error
        return bus

    @property
    def is_connected(self) -> bool:
        return bool(self._client.is_connected)

    @property
    def is_closed(self) -> bool:
        return bool(self._client.is_closed)

    async def publish(self, subject: str, payload: bytes, headers: Headers | None = None) -> None:
        with self.mapped_errors(subject):
            await self._client.publish(subject, payload, headers=_plain(headers))

    async def request(
        self, subject: str, payload: bytes, *, timeout_s: float, headers: Headers | None = None
    ) -> BusMessage:
        with self.mapped_errors(subject):
            answer = await self._client.request(subject, payload, timeout=timeout_s, headers=_plain(headers))
        return BusMessage(subject, answer.data, dict(answer.headers or {}))

    async def subscribe(self, subject: str, handler: MessageHandler, *, max_pending: int = 4096) -> NatsSubscription:
        async def on_message(message: Msg) -> None:
            try:
                payload = await handler(BusMessage(message.subject, message.data, dict(message.headers or {})))
            except Exception:  # the boundary between the bus and whatever a handler does
                logger.exception("handler of %s failed", message.subject)
                return
            if payload is not None and message.reply:
                await self._answer(message.reply, payload)

        client_subscription = await self._client.subscribe(subject, cb=on_message, pending_msgs_limit=max_pending)
        subscription = NatsSubscription(client_subscription, self._unsubscribe)
        self._subscriptions[client_subscription] = subscription
        try:
            await self._settle(subject)
        except BusError as error:  # the client keeps the subscription, and begins it with the next connection
            logger.debug("subscribing to %s: %s", subject, error)
        return subscription

    async def bucket(
        self,
        name: str,
        *,
        ttl_s: float | None = None,
        durable: bool = False,
        max_bytes: int | None = None,
        max_entries: int | None = None,
    ) -> NatsBucket:
        return await self._opened(name, BucketForm(ttl_s, durable, max_bytes, max_entries, self._num_replicas))

    async def open_bucket(self, name: str) -> NatsBucket:
        return await self._opened(name, None)

    async def _opened(self, name: str, form: BucketForm | None) -> NatsBucket:
        bucket = NatsBucket(self._client.jetstream(timeout=2), self, name, form)
        await bucket.open()
        return bucket

    async def close(self) -> None:
        await self._client.close()
        for feed in list(self._feeds):
            feed.mark_stale()

    def add_feed(self, feed: WatchFeed) -> None:
        self._feeds.add(feed)

    def remove_feed(self, feed: WatchFeed) -> None:
        self._feeds.discard(feed)

    @contextmanager
    def mapped_errors(self, subject: str) -> Iterator[None]:
        """Raises the errors of `protocol` for those of the client; without a connection at once."""
        if not self.is_connected:
            raise BusUnavailable(f"not connected to {self._shown_url}")
        try:
            yield
        except nats.errors.NoRespondersError as error:
            raise NoResponder(f"nobody listens on {subject}") from error
        except (TimeoutError, nats.errors.TimeoutError, nats.errors.FlushTimeoutError) as error:
            raise BusTimeout(f"no answer on {subject} in time") from error
        except (
            nats.errors.ConnectionClosedError,
            nats.errors.ConnectionReconnectingError,
            nats.errors.OutboundBufferLimitError,
            nats.js.errors.ServiceUnavailableError,
            nats.js.errors.ServerError,  # a full disk, say: it may pass, and nobody who waits for it ends
            ConnectionError,
        ) as error:
            if isinstance(error, nats.js.errors.APIError) and error.err_code == MAX_BYTES_EXCEEDED:
                raise BucketFull(f"{subject} holds all that it may") from error
            raise BusUnavailable(f"{self._shown_url}: {error}") from error
        except (nats.js.errors.NotFoundError, nats.js.errors.KeyValueError):
            raise  # what a bucket itself makes something of
        except nats.js.errors.APIError as error:
            raise BusRefused(f"{self._shown_url} refuses {subject}: {error}") from error

    async def _unsubscribe(self, subscription: ClientSubscription) -> None:
        self._subscriptions.pop(subscription, None)
        try:
            await subscription.unsubscribe()
            await self._settle(subscription.subject)
        except (nats.errors.ConnectionClosedError, nats.errors.BadSubscriptionError, BusError) as error:
            # Without its connection the subscription is gone too, and it does not come back with a new one.
            logger.debug("unsubscribing from %s: %s", subscription.subject, error)

    async def _settle(self, subject: str) -> None:
        """Returns when the server has taken everything sent so far.

        Twice, since the client's PING overtakes commands that its flusher has yet to write; those go out while the
        first PONG is awaited.
        """
        with self.mapped_errors(subject):
            await self._client.flush(timeout=_FLUSH_TIMEOUT_S)
            await self._client.flush(timeout=_FLUSH_TIMEOUT_S)

    async def _answer(self, subject: str, payload: bytes) -> None:
        try:
            with self.mapped_errors(subject):
                await self._client.publish(subject, payload)
        except BusUnavailable:
            # Delivery is at most once: whoever asked will time out and ask again.
            logger.debug("an answer was lost with the connection")

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            subscription = self._subscriptions.get(error.sub)
            if subscription is not None:
                subscription.count_drop()
            return
        self._last_error = f"{type(error).__name__}: {error}"
        is_denied = "permissions violation" in self._last_error.lower()
        logger.log(logging.WARNING if is_denied else logging.DEBUG, "nats client: %s", self._last_error)

    async def _on_disconnected(self) -> None:
        if not self._client.is_closed:
            logger.warning("lost the connection to NATS at %s; trying again", self._shown_url)

    async def _on_reconnected(self) -> None:
        logger.info("connected to NATS at %s again", self._shown_url)
        for feed in self._feeds:
            feed.mark_stale()


def _tls_context(ca_file: str) -> ssl.SSLContext:
    """Raises BusUnavailable."""
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        reason = getattr(error, "reason", None) or error.strerror or error
        raise BusUnavailable(f"nats_ca_file {ca_file}: cannot be used ({reason})") from error


def _check_seed(seed_file: str) -> None:
    """Raises BusUnavailable for what no client can use."""
    import nkeys  # noqa: PLC0415 - processes without a key do not load it

    try:
        nkeys.from_seed(bytearray(Path(seed_file).read_bytes().strip()))
    except OSError as error:
        raise BusUnavailable(f"nats_seed_file {seed_file}: {error.strerror}") from error
    except (nkeys.NkeysError, ValueError) as error:
        raise BusUnavailable(f"nats_seed_file {seed_file}: has no seed of an NKEY in it") from error


def _plain(headers: Headers | None) -> dict[str, str] | None:
    return dict(headers) if headers else None

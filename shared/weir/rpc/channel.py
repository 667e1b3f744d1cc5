"""Client channels: keep-alive that notices a dead peer within seconds, fast reconnects, message limits."""

import asyncio
from typing import Protocol

import grpc.aio

from weir.core.addresses import UNIX, bare, is_unix
from weir.rpc.identities import Party

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Above what any field limit allows, so that a prompt that is too long is answered with the field's name."""

KEEPALIVE_TIME_MS = 4_000
"""Without a sign of life, after which a side asks for one."""
KEEPALIVE_TIMEOUT_MS = 3_000
"""Without an answer, after which a connection is given up."""


def keepalive(timeout_ms: int = KEEPALIVE_TIMEOUT_MS) -> tuple[tuple[str, int], ...]:
    """Options of a channel or server that gives up connections whose other side is silent."""
    return (
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        # What gRPC 1.85 goes by, and a minute unless it is set.
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )


CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    *keepalive(),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Retries belong to the caller, who knows what is idempotent.
    ("grpc.enable_retries", 0),
    # Channels to the same address do not share one connection's fate and back-off.
    ("grpc.use_local_subchannel_pool", 1),
    # Peers are on this machine or in this cluster: a proxy from the environment is not meant for them.
    ("grpc.enable_http_proxy", 0),
)


def make_channel(address: str) -> grpc.aio.Channel:
    """A channel without TLS to HOST:PORT or unix:/PATH. It connects lazily and reconnects by itself."""
    options = list(CHANNEL_OPTIONS)
    if is_unix(address):
        # The default authority of a Unix socket is its escaped path, which other implementations refuse.
        options.append(("grpc.default_authority", "localhost"))
    return grpc.aio.insecure_channel(address, options=options)


class Dialer(Protocol):
    """How a process reaches others of its stack, by HOST:PORT or unix:/PATH."""

    @property
    def version(self) -> int:
        """Another one: channels that were opened before should be opened anew, once that disturbs nobody."""
        ...

    def open(self, address: str, party: Party) -> grpc.aio.Channel:
        """A channel that connects lazily and reconnects by itself, to a process of this party. Whoever opens it closes
        it."""
        ...

    async def is_refused(self, address: str, timeout_s: float) -> bool:
        """Whether nobody listens there: its process is gone. False where there is no answer within `timeout_s`."""
        ...


class PlainDialer:
    """Without TLS: for what only processes of one user, or of one private network, reach."""

    version = 0

    def open(self, address: str, party: Party) -> grpc.aio.Channel:
        del party
        return make_channel(address)

    async def is_refused(self, address: str, timeout_s: float) -> bool:
        return await is_refused(address, timeout_s)


async def is_refused(address: str, timeout_s: float) -> bool:
    """As a connection shows that is opened for nothing else."""
    try:
        async with asyncio.timeout(timeout_s):
            if is_unix(address):
                _, writer = await asyncio.open_unix_connection(address.removeprefix(UNIX))
            else:
                host, _, port = address.rpartition(":")
                _, writer = await asyncio.open_connection(bare(host), int(port))
    except (ConnectionRefusedError, FileNotFoundError):
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False

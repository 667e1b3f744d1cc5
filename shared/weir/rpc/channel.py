"""Client channels: keep-alive that notices a dead peer within seconds, fast reconnects, message limits."""

import asyncio
from typing import Protocol

import grpc.aio

from weir.core.addresses import UNIX, is_unix

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Above what any field limit allows, so that a prompt that is too long is answered with the field's name."""

KEEPALIVE_TIME_MS = 4_000
KEEPALIVE_TIMEOUT_MS = 3_000

_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
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
    options: list[tuple[str, int | str]] = list(_CHANNEL_OPTIONS)
    if is_unix(address):
        # The default authority of a Unix socket is its escaped path, which other implementations refuse.
        options.append(("grpc.default_authority", "localhost"))
    return grpc.aio.insecure_channel(address, options=options)


class Dialer(Protocol):
    """How a process reaches others of its stack, by HOST:PORT or unix:/PATH."""

    def open(self, address: str) -> grpc.aio.Channel:
        """A channel that connects lazily and reconnects by itself. Whoever opens it closes it."""
        ...

    async def is_refused(self, address: str, timeout_s: float) -> bool:
        """Whether nobody listens there: its process is gone. False where there is no answer within `timeout_s`."""
        ...


class PlainDialer:
    """Without TLS: for what only processes of one user, or of one private network, reach."""

    def open(self, address: str) -> grpc.aio.Channel:
        return make_channel(address)

    async def is_refused(self, address: str, timeout_s: float) -> bool:
        """As a connection shows that is opened for nothing else."""
        try:
            async with asyncio.timeout(timeout_s):
                if is_unix(address):
                    _, writer = await asyncio.open_unix_connection(address.removeprefix(UNIX))
                else:
                    host, _, port = address.rpartition(":")
                    _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except (ConnectionRefusedError, FileNotFoundError):
            return True
        except (OSError, TimeoutError):
            return False
        writer.close()
        return False

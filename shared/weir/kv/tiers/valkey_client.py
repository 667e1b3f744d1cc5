"""Connections to a Valkey or Redis server. Needs the extra `valkey`: nothing imports this before it is asked for.

The client's own limit of time is of each piece that comes; here a command and its answer have one together, so that a
server that sends a byte now and then holds nobody up.
"""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis import ConnectionPool, Redis
from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection
from redis.credentials import CredentialProvider
from redis.exceptions import AuthenticationError, RedisError
from redis.retry import Retry

from weir.kv.tiers.valkey_address import ValkeyAddress

ANSWER_S, _CONNECT_S = 1.0, 1.0
_MAX_CONNECTIONS = 32
_LONGEST_REASON = 200
"""Characters: it may repeat what the server sent."""
_READ_BYTES = 1 << 20
"""At a time: with less the client copies a page more often."""


@dataclass(frozen=True, slots=True)
class ValkeySettings:
    """`password_file`: read at each connection, so that a password may change. `ca_file`: of authorities; the system's
    where it is empty. `ttl_s`: seconds that a page stays which nobody uses. `answer_s`: seconds that a command and its
    answer may take."""

    address: ValkeyAddress
    password_file: str = ""
    ca_file: str = ""
    ttl_s: int = 7 * 24 * 3600
    answer_s: float = ANSWER_S


def make_client(settings: ValkeySettings) -> Redis:
    """Connects when it is first used, and once for each thread that uses it at a time. Nothing is tried again."""
    address = settings.address
    tls: dict[str, Any] = {"ssl_ca_certs": settings.ca_file or None} if address.is_encrypted else {}
    has_credentials = address.user or settings.password_file
    pool = ConnectionPool(
        connection_class=_EncryptedConnection if address.is_encrypted else _PlainConnection,
        max_connections=_MAX_CONNECTIONS,
        host=address.host,
        port=address.port,
        db=address.database,
        credential_provider=_PasswordFile(settings) if has_credentials else None,
        socket_timeout=settings.answer_s,
        socket_connect_timeout=_CONNECT_S,
        socket_read_size=_READ_BYTES,
        protocol=2,
        driver_info=None,
        retry=Retry(NoBackoff(), 0),
        **tls,
    )
    return Redis(connection_pool=pool)


@contextmanager
def asking() -> Iterator[None]:
    """Round whatever asks a client: of an answer that is none it raises what its parser happens to run into. Raises
    RedisError and OSError alone."""
    try:
        yield
    except (RedisError, OSError):
        raise
    except Exception as error:
        why = str(error)[:_LONGEST_REASON]
        raise ConnectionError(f"cannot be asked, or its answer is none ({type(error).__name__}: {why})") from error


class _PasswordFile(CredentialProvider):
    def __init__(self, settings: ValkeySettings) -> None:
        self._user, self._path = settings.address.user, settings.password_file

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        try:
            password = Path(self._path).read_text().strip() if self._path else ""
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or "is no text"
            raise AuthenticationError(f"page_valkey_password_file {self._path}: {why}") from error
        return (self._user, password) if self._user else (password,)


class _BoundedSocket:
    """From the first byte of a command to the last of its answer `answer_s`, and no longer than who reads says."""

    def __init__(self, inner: socket.socket, answer_s: float) -> None:
        self._inner, self._answer_s = inner, answer_s
        self._longest_s = answer_s
        self._ends_at_s = 0.0
        self._is_sending = False

    def settimeout(self, seconds: float | None) -> None:
        self._longest_s = self._answer_s if seconds is None else seconds

    def sendall(self, data: bytes) -> None:
        if not self._is_sending:
            self._is_sending, self._ends_at_s = True, time.monotonic() + self._answer_s
        self._limit()
        self._inner.sendall(data)

    def recv(self, *arguments: int) -> bytes:
        self._is_sending = False
        self._limit()
        return self._inner.recv(*arguments)

    def recv_into(self, *arguments: Any) -> int:
        self._is_sending = False
        self._limit()
        return self._inner.recv_into(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _limit(self) -> None:
        left_s = self._ends_at_s - time.monotonic()
        if self._longest_s and left_s <= 0:  # who asks for 0 looks whether there is anything
            raise TimeoutError(f"no whole answer within {self._answer_s} s")
        self._inner.settimeout(min(self._longest_s, max(left_s, 0)))


class _PlainConnection(Connection):
    def _connect(self) -> _BoundedSocket:
        return _BoundedSocket(super()._connect(), self.socket_timeout or ANSWER_S)  # type: ignore[no-untyped-call]


class _EncryptedConnection(SSLConnection):
    def _connect(self) -> _BoundedSocket:
        return _BoundedSocket(super()._connect(), self.socket_timeout or ANSWER_S)  # type: ignore[no-untyped-call]

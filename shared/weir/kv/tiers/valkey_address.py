"""Where a Valkey or Redis server is, as its URL says it: redis://[USER@]HOST[:PORT][/DATABASE], rediss:// with TLS."""

from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from weir.core.addresses import bracketed

_IS_ENCRYPTED = {"redis": False, "valkey": False, "rediss": True, "valkeys": True}
_PORT = 6379
_MAX_DATABASE = 1 << 20


@dataclass(frozen=True, slots=True)
class ValkeyAddress:
    """As text it says nothing of the user."""

    host: str
    port: int
    database: int
    user: str
    is_encrypted: bool

    def __str__(self) -> str:
        scheme = "rediss" if self.is_encrypted else "redis"
        return f"{scheme}://{bracketed(self.host)}:{self.port}/{self.database}"


def parse_valkey_url(url: str) -> ValkeyAddress:
    """Raises ValueError, with words that follow the field's name, and never repeat a password."""
    try:
        parts = urlsplit(url)
        port = _PORT if parts.port is None else parts.port
    except ValueError:
        raise ValueError("is no URL: give redis://HOST:PORT or rediss://HOST:PORT") from None
    if parts.password is not None:
        raise ValueError("has a password in it, which others see in the list of processes: put it into a file")
    if parts.scheme not in _IS_ENCRYPTED or not parts.hostname or parts.query or parts.fragment:
        raise ValueError("must be redis://[USER@]HOST[:PORT][/DATABASE], or rediss:// with TLS")
    try:
        parts.hostname.encode("idna")
    except UnicodeError:
        raise ValueError(
            "names a host that no name server can be asked for: a part of it is empty, or too long"
        ) from None
    database = parts.path.strip("/") or "0"
    if not (database.isascii() and database.isdigit() and int(database) <= _MAX_DATABASE):
        raise ValueError(f"names database {database!r}: must be a number of one")
    return ValkeyAddress(
        parts.hostname, port, int(database), unquote(parts.username or ""), _IS_ENCRYPTED[parts.scheme]
    )

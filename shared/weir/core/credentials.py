"""API keys, and passwords in URLs: secrets, and what may be shown of them.

Whoever is not the client knows only the SHA-256 of its key, which cannot be turned back. A plain digest is enough for
keys that are made here: they hold 256 random bits, so that nobody can try them all.
"""

import hashlib
import secrets

MIN_KEY_CHARS = 16
"""Of keys that are digested for a limits file: shorter ones could be found by trying."""

_MADE_BYTES = 32
_PREFIX = "weir-"
_SCHEME = "bearer"


def make_key() -> str:
    """A new key of 256 random bits."""
    return _PREFIX + secrets.token_urlsafe(_MADE_BYTES)


def key_digest(key: str) -> bytes:
    """The SHA-256 of a key, whatever characters it has."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def try_read_key(authorization: str, x_api_key: str) -> str | None:
    """The key of a request's headers `authorization: Bearer KEY` or, without one, `x-api-key: KEY`."""
    scheme, _, key = authorization.strip().partition(" ")
    if scheme.lower() == _SCHEME and key.strip():
        return key.strip()
    return x_api_key.strip() or None


def key_metadata(api_key: str) -> tuple[tuple[str, str], ...]:
    """The metadata that names the caller. Raises ValueError for a key that no header can carry; it is not repeated."""
    if not api_key:
        return ()
    if not (api_key.isascii() and api_key.isprintable()):
        raise ValueError("the API key has characters that no header can carry: use printable ASCII")
    return (("authorization", f"Bearer {api_key}"),)


def masked_url(url: str) -> str:
    """The URL with its user, password or token replaced: for logs, errors, state files and terminals.

    Whatever comes before the last @ may be secret, since passwords are not always escaped as they should be.
    """
    head, at, where = url.rpartition("@")
    scheme, separator, _ = head.partition("://")
    if not at:
        return url
    return f"{scheme}://***@{where}" if separator else f"***@{where}"

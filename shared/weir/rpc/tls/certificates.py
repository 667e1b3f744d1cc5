"""A certificate, its key and its authorities: read from files as one, and tried before anybody uses them.

Tried is a handshake in memory, as each end. It finds what a real one would meet: halves that do not belong together, a
file that is half written, a certificate that has expired or that its authority did not sign.
"""

import contextlib
import math
import os
import re
import ssl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weir.core.errors import WeirError
from weir.rpc.identities import CertifiedIdentity, try_parse_identity

_MAX_FILE_BYTES = 1 << 20
_MAX_TURNS = 10
_FIRST = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----\s*", re.DOTALL)
Stamp = tuple[tuple[int, int, int, int], ...]
"""Of each file: device, inode, time of the last change, size."""


class CertificateError(WeirError):
    """Files that cannot be used; names the setting, the file and what is wrong."""


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """Paths, and the settings that name them. `ca`: empty for a certificate for clients, which others' authorities
    have signed; then nobody is asked for one either."""

    cert: str
    key: str
    ca: str = ""
    setting: str = "tls"

    @property
    def named_paths(self) -> tuple[tuple[str, Path], ...]:
        named = (("cert", self.cert), ("key", self.key), ("ca", self.ca))
        return tuple((f"{self.setting}_{part}", Path(path)) for part, path in named if path)

    def stamp(self) -> Stamp:
        """Changes whenever a file does, also when a link leads elsewhere. A file that is not there is all zeros."""
        return tuple(_stamp_of(path) for _, path in self.named_paths)

    def load(self) -> "Certificate":
        """Blocks for some milliseconds. Raises CertificateError."""
        chain, key, *rest = (_read(name, path) for name, path in self.named_paths)
        authorities = rest[0] if rest else b""
        with _named_errors(self):
            return _tried(chain, key, authorities)


@dataclass(frozen=True, slots=True)
class Certificate:
    """One that has been tried. Times are seconds since 1970; with its authorities it ends too."""

    chain_pem: bytes
    key_pem: bytes = field(repr=False)
    ca_pem: bytes
    begins_at_s: float
    expires_at_s: float
    uris: tuple[str, ...]
    dns_names: tuple[str, ...]
    addresses: tuple[str, ...]

    @property
    def identity(self) -> CertifiedIdentity | None:
        """None: of no process of a stack."""
        return try_parse_identity(self.uris[0]) if len(self.uris) == 1 else None

    def use_in(self, context: ssl.SSLContext) -> None:
        """Connections that are made from now on have it."""
        with _as_file(self.chain_pem) as chain, _as_file(self.key_pem) as key:
            context.load_cert_chain(chain, key, password=_no_password)


def _tried(chain: bytes, key: bytes, authorities: bytes) -> Certificate:
    """Raises OSError, of which ssl's errors are, and ValueError."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    with _as_file(chain) as chain_path, _as_file(key) as key_path:
        server.load_cert_chain(chain_path, key_path, password=_no_password)
        if authorities:
            client.load_cert_chain(chain_path, key_path, password=_no_password)
    if authorities:
        server.verify_mode = ssl.CERT_REQUIRED
        server.load_verify_locations(cadata=_text(authorities))
        client.load_verify_locations(cadata=_text(authorities))
    else:  # whoever has signed it: it is its own authority here, so that its names and its time are still looked at
        first = _FIRST.search(chain)
        client.load_verify_locations(cadata=_text(first[0] if first else b""))
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    found = _shake_hands(server, client)
    names = [(kind, str(name)) for kind, name in found.get("subjectAltName", ())]
    return Certificate(
        chain,
        key,
        authorities,
        ssl.cert_time_to_seconds(found["notBefore"]),
        min(ssl.cert_time_to_seconds(found["notAfter"]), _end_of(server.get_ca_certs()) if authorities else math.inf),
        tuple(name for kind, name in names if kind == "URI"),
        tuple(name for kind, name in names if kind == "DNS"),
        tuple(name for kind, name in names if kind == "IP Address"),
    )


def _end_of(authorities: Sequence[Mapping[str, Any]]) -> float:
    """Of the one that lasts longest: amid a rotation an older one may end."""
    return max(ssl.cert_time_to_seconds(str(authority["notAfter"])) for authority in authorities)


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> dict[str, Any]:
    """What the client finds in the server's certificate. Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True))
    for _ in range(_MAX_TURNS):
        done = 0
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
                done += 1
        if done == len(ends):
            found: dict[str, Any] | None = ends[0].getpeercert()
            return found or {}
    raise ssl.SSLError("a handshake with itself does not come to an end")


@contextlib.contextmanager
def _named_errors(files: CertificateFiles) -> Iterator[None]:
    """ssl's errors as CertificateError."""
    try:
        yield
    except ssl.SSLCertVerificationError as error:
        of_whom = f" by {files.setting}_ca {files.ca}" if files.ca else ""
        raise CertificateError(
            f"{files.setting}_cert {files.cert}: not valid{of_whom}: {error.verify_message}"
        ) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        which = ", ".join(f"{name} {path}" for name, path in files.named_paths)
        raise CertificateError(
            f"{which}: cannot be used together ({reason}); each must be PEM, the key without a "
            "password and that of the certificate"
        ) from error


@contextlib.contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """A path for ssl, which reads files alone, so that what is used is what was read, and once."""
    descriptor = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _read(name: str, path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise CertificateError(f"{name} {path}: cannot be read ({error.strerror or error})") from error
    if len(content) > _MAX_FILE_BYTES:
        raise CertificateError(f"{name} {path}: more than {_MAX_FILE_BYTES} bytes, which no certificate has")
    return content


def _stamp_of(path: Path) -> tuple[int, int, int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0, 0)
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def _text(pem: bytes) -> str:
    return pem.decode("ascii")


def _no_password() -> str:
    """Else a key with one would be asked for at the terminal."""
    raise ValueError("the key has a password")

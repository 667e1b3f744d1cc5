"""The certificates of one process: among the stack's, and for clients."""

import asyncio
import ssl
from collections.abc import Callable, Iterator

import grpc

from weir.core.addresses import is_unix
from weir.core.roles import WORKER_ROLES
from weir.core.tasks import end_tasks
from weir.rpc.channel import Dialer, PlainDialer
from weir.rpc.identities import CertifiedIdentity
from weir.rpc.tls.certificates import Certificate, CertificateError, CertificateFiles
from weir.rpc.tls.credentials import HttpsContext, TlsDialer, server_credentials
from weir.rpc.tls.watch import CertificateWatch
from weir.runtime.config import ServiceConfig


class OwnCheck:
    """That a certificate among the stack's is of this process, and stays so: its id carries the mark of its name."""

    def __init__(self, instance: str, role: str) -> None:
        self._instance = instance
        self._roles = WORKER_ROLES if role in WORKER_ROLES else (role,)
        self._first: CertifiedIdentity | None = None

    def __call__(self, certificate: Certificate) -> None:
        """Raises CertificateError."""
        found, roles = certificate.identity, " or ".join(self._roles)
        if found is None:
            named = ", ".join(certificate.uris) or "none"
            wanted = f"spiffe://TRUST-DOMAIN/weir/{self._instance}/{self._roles[0]}/NAME"
            raise CertificateError(f"tls_cert: its URIs ({named}) must be one alone, {wanted}")
        if found.instance != self._instance or found.role not in self._roles:
            raise CertificateError(f"tls_cert: is of {found.uri}, not of a {roles} of instance {self._instance}")
        if found.dns_name not in certificate.dns_names:
            raise CertificateError(f"tls_cert: lacks the DNS name {found.dns_name}, by which others know its holder")
        if self._first not in (None, found):
            raise CertificateError(f"tls_cert: is of {found.uri}, not of {self._first.uri} as before")
        self._first = found


class ProcessTls:
    """What a process has of them. Raises CertificateError for files that cannot be used."""

    def __init__(self, config: ServiceConfig, role: str) -> None:
        self._config = config
        self.own = _watch_own(config, role)
        cert, key = config.public_tls
        files = CertificateFiles(cert, key, setting="public_tls")
        self.public = CertificateWatch(files, check_names) if cert else None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def identity(self) -> CertifiedIdentity | None:
        """None: it has no certificate among the stack's."""
        return None if self.own is None else self.own.current.identity

    @property
    def dialer(self) -> Dialer:
        return PlainDialer() if self.own is None else TlsDialer(self.own, self._config.instance)

    @property
    def credentials(self) -> grpc.ServerCredentials | None:
        """Of its gRPC port; None: without TLS."""
        if is_unix(self._config.listen):
            return None
        watch = self.public if self._config.is_public else self.own
        return None if watch is None else server_credentials(watch)

    @property
    def peer_credentials(self) -> grpc.ServerCredentials | None:
        """Of a further port for others of the stack; None: without TLS."""
        return None if self.own is None else server_credentials(self.own)

    @property
    def http_context(self) -> ssl.SSLContext | None:
        """Of a port for clients by HTTP, asked for once; None: without TLS."""
        return None if self.public is None else HttpsContext(self.public).outer

    @property
    def told(self) -> dict[str, str]:
        """For those of this host who ask its gRPC port: a name in its certificate, and the certificate itself, in PEM,
        where clients need have none."""
        if self.public is not None:
            return _told_of(self.public.current)
        if self.identity is None or self.credentials is None:
            return {}
        return {"tls_name": self.identity.dns_name}

    def on_told(self, listener: Callable[[dict[str, str]], None]) -> None:
        """Called with what is to be told from then on."""
        if self.public is not None:
            self.public.on_change(lambda certificate: listener(_told_of(certificate)))

    def start(self) -> None:
        """Within a running loop."""
        self._tasks = [asyncio.create_task(watch.run(), name="watch certificates") for watch in self._watches()]

    async def stop(self) -> None:
        await end_tasks(self._tasks)

    def metrics(self) -> dict[str, float]:
        return {name: value for watch in self._watches() for name, value in watch.metrics().items()}

    def _watches(self) -> Iterator[CertificateWatch]:
        return (watch for watch in (self.own, self.public) if watch is not None)


def _names_of(certificate: Certificate) -> tuple[str, ...]:
    return (*certificate.dns_names, *certificate.addresses)


def check_names(certificate: Certificate) -> None:
    """Raises CertificateError for one that no client could know its server by."""
    if not _names_of(certificate):
        raise CertificateError("public_tls_cert: names no host and no address (subjectAltName) that clients call")


def _told_of(certificate: Certificate) -> dict[str, str]:
    return {"tls_cert_pem": certificate.chain_pem.decode("ascii", "replace"), "tls_name": _names_of(certificate)[0]}


def _watch_own(config: ServiceConfig, role: str) -> CertificateWatch | None:
    if not config.tls_cert:
        return None
    files = CertificateFiles(config.tls_cert, config.tls_key, config.tls_ca)
    return CertificateWatch(files, OwnCheck(config.instance, role))

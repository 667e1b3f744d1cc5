"""What servers and clients make of certificates: credentials of gRPC, the context of an HTTP server, and the dialer of
processes that prove who they are."""

import ssl

import grpc
import grpc.aio

from weir.core.addresses import is_unix
from weir.rpc.channel import CHANNEL_OPTIONS, is_refused, make_channel
from weir.rpc.identities import Party, dns_name_of
from weir.rpc.tls.certificates import Certificate
from weir.rpc.tls.watch import CertificateWatch


def server_credentials(watch: CertificateWatch) -> grpc.ServerCredentials:
    """New handshakes have what is current then; callers are asked for theirs where there are authorities to tell."""
    served = watch.current

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """In a thread of gRPC's, at each handshake. None: what it has is current; it makes anew what it is given."""
        nonlocal served
        current = watch.current
        if current is served:
            return None
        served = current
        return _configuration(current)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(served),
        fetch,  # type: ignore[arg-type]  # None is what its documentation says; the stub does not
        require_client_authentication=bool(served.ca_pem),
    )


class HttpsContext:
    """`outer` is for a server's whole life: each handshake goes on with a context of the certificate that is current
    then. A context that got one certificate after another would keep those of other kinds of keys."""

    def __init__(self, watch: CertificateWatch) -> None:
        self.outer = _server_context(watch.current)
        self._current = self.outer
        self.outer.sni_callback = self._choose
        watch.on_change(self._change)

    def _change(self, certificate: Certificate) -> None:
        self._current = _server_context(certificate)

    def _choose(self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        """OpenSSL calls it whether or not the client names a host."""
        del name, context
        connection.context = self._current


class TlsDialer:
    """By TCP with this process' certificate, to whom the certificate names as of the party that was asked for.

    A channel keeps the certificate that it was opened with.
    """

    def __init__(self, watch: CertificateWatch, instance: str) -> None:
        self._watch = watch
        self._instance = instance

    @property
    def version(self) -> int:
        return self._watch.version

    def open(self, address: str, party: Party) -> grpc.aio.Channel:
        if is_unix(address):
            return make_channel(address)
        return make_named_channel(address, dns_name_of(party, self._instance), self._watch.current)

    async def is_refused(self, address: str, timeout_s: float) -> bool:
        return await is_refused(address, timeout_s)


def _server_context(certificate: Certificate) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    certificate.use_in(context)
    return context


def make_named_channel(address: str, dns_name: str, certificate: Certificate) -> grpc.aio.Channel:
    """To whom its certificate names so, with this one."""
    options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", dns_name)]
    return grpc.aio.secure_channel(address, client_credentials(certificate), options=options)


def client_credentials(certificate: Certificate) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(certificate.ca_pem, certificate.key_pem, certificate.chain_pem)


def _configuration(certificate: Certificate) -> grpc.ServerCertificateConfiguration:
    pair = (certificate.key_pem, certificate.chain_pem)
    return grpc.ssl_server_certificate_configuration([pair], certificate.ca_pem or None)

"""What gRPC makes of certificates: credentials of servers, and the dialer of processes that prove who they are."""

import grpc
import grpc.aio

from weir.core.addresses import is_unix
from weir.rpc.channel import CHANNEL_OPTIONS, is_refused, make_channel
from weir.rpc.identities import Party, dns_name_of
from weir.rpc.tls.certificates import Certificate
from weir.rpc.tls.watch import CertificateWatch


def server_credentials(watch: CertificateWatch) -> grpc.ServerCredentials:
    """New handshakes have what is current then; callers are asked for theirs where there are authorities to tell."""
    asks_callers = bool(watch.current.ca_pem)

    def fetch() -> grpc.ServerCertificateConfiguration:
        return _configuration(watch.current)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(watch.current), fetch, require_client_authentication=asks_callers
    )


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
        options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", dns_name_of(party, self._instance))]
        return grpc.aio.secure_channel(address, client_credentials(self._watch.current), options=options)

    async def is_refused(self, address: str, timeout_s: float) -> bool:
        return await is_refused(address, timeout_s)


def client_credentials(certificate: Certificate) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(certificate.ca_pem, certificate.key_pem, certificate.chain_pem)


def _configuration(certificate: Certificate) -> grpc.ServerCertificateConfiguration:
    pair = (certificate.key_pem, certificate.chain_pem)
    return grpc.ssl_server_certificate_configuration([pair], certificate.ca_pem or None)

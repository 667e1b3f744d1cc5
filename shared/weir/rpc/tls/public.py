"""How clients reach a gateway: with TLS where an authority's file or https:// says so."""

import ssl
from pathlib import Path

import grpc
import grpc.aio

from weir.rpc.channel import CHANNEL_OPTIONS, make_channel
from weir.rpc.tls.certificates import CertificateError

_HTTPS = "https://"


def public_target(address: str, ca: str) -> tuple[str, grpc.ChannelCredentials | None]:
    """What gRPC is given for a gateway at [https://]HOST:PORT; without credentials: no TLS.

    `ca`: a file with the authorities that are trusted; empty: with https:// those that gRPC brings. Raises
    CertificateError for a file that cannot be read.
    """
    target = address.removeprefix(_HTTPS).rstrip("/")
    if not ca:
        return target, grpc.ssl_channel_credentials() if address.startswith(_HTTPS) else None
    try:
        authorities = Path(ca).read_bytes()
    except OSError as error:
        raise CertificateError(f"ca {ca}: cannot be read ({error.strerror or error})") from error
    if b"-----BEGIN CERTIFICATE-----" not in authorities:  # gRPC would say no more than that it cannot connect
        raise CertificateError(f"ca {ca}: no certificate in PEM is in it")
    return target, grpc.ssl_channel_credentials(authorities)


def https_context(ca: str) -> ssl.SSLContext | bool:
    """What httpx verifies servers by: `ca`, else the authorities that it brings. Raises CertificateError."""
    if not ca:
        return True
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise CertificateError(f"ca {ca}: cannot be used ({error.strerror or error})") from error


def make_pinned_channel(address: str, cert_pem: str, server_name: str) -> grpc.aio.Channel:
    """To a server of this host that has told its certificate: nobody need have signed it."""
    options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", server_name)]
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(cert_pem.encode()), options=options)


def make_public_channel(address: str, ca: str) -> grpc.aio.Channel:
    """As `weir.rpc.channel.make_channel`. Raises CertificateError."""
    target, credentials = public_target(address, ca)
    if credentials is None:
        return make_channel(target)
    return grpc.aio.secure_channel(target, credentials, options=list(CHANNEL_OPTIONS))

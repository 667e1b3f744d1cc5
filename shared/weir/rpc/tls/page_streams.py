"""TLS of page streams, which are no gRPC: contexts of a process' certificate among the stack's."""

import ssl
from typing import Any

from weir.rpc.identities import CertifiedRole, try_parse_identity
from weir.rpc.tls.certificates import Certificate


def server_context(certificate: Certificate) -> ssl.SSLContext:
    """For one connection, which must show a certificate of the same authorities."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    return _prepared(context, certificate)


def client_context(certificate: Certificate) -> ssl.SSLContext:
    """For one connection, to whom its certificate names as the caller expects."""
    return _prepared(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), certificate)


def check_peer(connection: ssl.SSLSocket, instance: str, role: CertifiedRole) -> None:
    """Raises OSError for a caller that is another one."""
    named: Any = (connection.getpeercert() or {}).get("subjectAltName", ())
    uris = [str(value) for kind, value in named if kind == "URI"]
    found = try_parse_identity(uris[0]) if len(uris) == 1 else None
    if found is None or (found.instance, found.role) != (instance, role):
        raise OSError(f"its certificate ({', '.join(uris) or 'no URI'}) is not of a {role} of instance {instance}")


def _prepared(context: ssl.SSLContext, certificate: Certificate) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(cadata=certificate.ca_pem.decode("ascii"))
    certificate.use_in(context)
    return context

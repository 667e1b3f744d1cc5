"""Calls of whichever scheduler leads."""

from collections.abc import Callable, Sequence
from typing import Any

import grpc

from weir.core.addresses import is_unix
from weir.core.credentials import key_metadata
from weir.core.errors import Unavailable
from weir.rpc.errors import from_rpc_error
from weir.rpc.identities import dns_name_of
from weir.rpc.tls.certificates import Certificate
from weir.rpc.tls.credentials import client_credentials

_TIMEOUT_S = 10.0


class LeaderCalls:
    """A standby is Unavailable, and the next one is asked."""

    def __init__(self, addresses: Sequence[str], admin_key: str, certificate: Certificate | None = None) -> None:
        """HOST:PORT of each scheduler: the leader and those that stand by. `admin_key`: needed where anybody has keys.
        `certificate`: an operator's, where the stack has certificates.

        Raises ValueError for a key that no header can carry.
        """
        self._metadata = key_metadata(admin_key)
        self._channels = [_open_channel(address, certificate) for address in addresses]

    def ask(self, make_stub: Callable[[grpc.Channel], Any], method: str, request: object) -> Any:
        """Raises an error of `weir.core.errors`."""
        last = Unavailable("no scheduler is known")
        for channel in self._channels:
            try:
                return getattr(make_stub(channel), method)(request, timeout=_TIMEOUT_S, metadata=self._metadata)
            except grpc.RpcError as error:
                meant = from_rpc_error(error)
                if not isinstance(meant, Unavailable):
                    raise meant from error
                last = meant
        raise last

    def close(self) -> None:
        for channel in self._channels:
            channel.close()


def _open_channel(address: str, certificate: Certificate | None) -> grpc.Channel:
    options: list[tuple[str, int | str]] = [("grpc.enable_http_proxy", 0)]
    if certificate is None or is_unix(address):
        return grpc.insecure_channel(address, options=options)
    if certificate.identity is None:
        raise ValueError(f"the certificate names no process of Weir among its URIs ({', '.join(certificate.uris)})")
    options.append(("grpc.ssl_target_name_override", dns_name_of("scheduler", certificate.identity.instance)))
    return grpc.secure_channel(address, client_credentials(certificate), options=options)

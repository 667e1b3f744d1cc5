"""Where a server listens, and the address that others reach it by."""

import socket
from pathlib import Path

import grpc.aio

from weir.core.errors import WeirError

_WILDCARD_HOSTS = frozenset({"0.0.0.0", "[::]", "*"})


class AddressInUse(WeirError):
    """The address cannot be listened on."""


def bind(server: grpc.aio.Server, listen: str, advertise_host: str = "") -> str:
    """Binds and returns the address that others reach the server by. Raises AddressInUse.

    The folder of a Unix socket is made if need be, for this user alone.
    """
    if listen.startswith("unix:"):
        Path(listen.removeprefix("unix:")).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise AddressInUse(f"cannot listen on {listen}: in use, or not an address of this machine") from error
    return listen if listen.startswith("unix:") else reachable_address(listen, port, advertise_host)


def reachable_address(listen: str, port: int, advertise_host: str) -> str:
    """HOST:PORT; for a wildcard host this machine's name, unless `advertise_host` says better."""
    host = listen.rpartition(":")[0]
    if advertise_host:
        host = advertise_host
    elif host in _WILDCARD_HOSTS:
        host = socket.gethostname()
    return f"{host}:{port}"

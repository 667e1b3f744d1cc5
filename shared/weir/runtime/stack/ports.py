"""Loopback and public ports of a stack: are they free, and which one may NATS have."""

import socket
import zlib

from weir.core.errors import WeirError

# Below the kernel's range for outgoing connections: a server that is restarted must find its port free again.
_FIRST_PORT = 14_000
_NUM_PORTS = 16_000


class PortBusy(WeirError):
    """Somebody listens there."""


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # As servers do: connections of an earlier server that linger in TIME_WAIT do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError:
            return False
    return True


def check_free(host: str, port: int, flag: str) -> None:
    """Raises PortBusy, naming the flag that chooses another port."""
    if not is_free(host, port):
        raise PortBusy(f"{flag} {port}: in use on {host}, or not allowed; stop what listens there, or choose another")


def find_free_port(host: str, name: str) -> int:
    """A free port, the same one for the same name as long as it is free, so that two names seldom want the same."""
    start = zlib.crc32(name.encode())
    for offset in range(_NUM_PORTS):
        port = _FIRST_PORT + (start + offset) % _NUM_PORTS
        if is_free(host, port):
            return port
    raise PortBusy(f"no free port on {host} from {_FIRST_PORT} to {_FIRST_PORT + _NUM_PORTS}")

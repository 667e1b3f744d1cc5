"""Where servers listen: addresses, HOST:PORT or unix:/PATH, with who can reach them; and ports for servers that start
later, free, and none that the kernel may give an outgoing connection meanwhile."""

import ipaddress
import os
import random
import re
import socket
from collections.abc import Collection
from contextlib import suppress
from functools import cache
from pathlib import Path

LOOPBACK = "127.0.0.1"
UNIX = "unix:"
_MAX_UNIX_PATH_BYTES = 107
_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10_001  # below are the ports that programs have by custom
_LAST = 65_535
_KERNEL_DEFAULT = (32_768, 60_999)
_MIN_PORTS = 1000  # fewer than these, and two programs want the same too often


class NoFreePort(OSError):
    """All ports that a server may be given are in use."""


def is_unix(address: str) -> bool:
    return address.startswith(UNIX)


def is_of_this_machine(address: str) -> bool:
    """Whether no other machine reaches it."""
    return is_unix(address) or is_loopback(address.rpartition(":")[0])


def bare(host: str) -> str:
    """Without the brackets that an IPv6 address may have."""
    return host.strip("[]")


def bracketed(host: str) -> str:
    """An IPv6 address in the brackets that it needs before a port; other hosts as they are."""
    return f"[{bare(host)}]" if ":" in host else host


def is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(bare(host))
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return (mapped or address).is_loopback
    except ValueError:
        return host == "localhost"


def check_listen(name: str, address: str) -> None:
    """Raises ValueError, naming the field `name`, for what is neither HOST:PORT nor unix:/PATH."""
    if is_unix(address):
        path = address.removeprefix(UNIX)
        if not path.startswith("/"):
            raise ValueError(f"{name} {address!r}: the path of a Unix socket must be absolute")
        # It is bound by a name of ten characters beside it first; a new name has thirteen.
        names = ("0123456789abc",) if path.endswith("/") else ("0123456789", Path(path).name)
        folder = path.rpartition("/")[0]
        if max(len(os.fsencode(f"{folder}/{name}")) for name in names) > _MAX_UNIX_PATH_BYTES:
            limit = f"longer than the {_MAX_UNIX_PATH_BYTES} bytes that a Unix socket's path can have"
            raise ValueError(f"{name} {address!r}: {limit}; set WEIR_RUNTIME_DIR to a shorter folder")
        return
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) <= 65535):
        raise ValueError(
            f"{name} {address!r}: must be HOST:PORT with a port of 0 to 65535, unix:/PATH or unix:/FOLDER/"
        )


def split_port(address: str) -> tuple[str, int]:
    """Host, without brackets, and port. Raises ValueError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= 65535:
        raise ValueError(f"address {address[:100]!r}: must be HOST:PORT")
    return bare(host), int(port)


def check_advertised(host: str, name: str = "advertise_host") -> None:
    """Raises ValueError."""
    is_ipv6 = host.count(":") > 1
    if not re.fullmatch(r"[A-Za-z0-9._-]*|\[?[0-9A-Fa-f:.]+(%\w+)?\]?", host) or (":" in host and not is_ipv6):
        raise ValueError(f"{name} {host!r}: must be a host name or address alone; the port is that of listen")
    if host in ("0.0.0.0", "::", "[::]"):
        raise ValueError(f"{name} {host!r}: nobody can connect to that; name this machine, or leave it empty")


def server_ports(range_file: Path = _RANGE_FILE) -> range:
    """The ports from 10001 that no outgoing connection is given: those below the kernel's range, or else above it.

    All from 10001 where that range leaves too few; the kernel's default range where `range_file` does not say it.
    """
    try:
        low, high = map(int, range_file.read_text().split())
    except (OSError, ValueError):
        low, high = _KERNEL_DEFAULT
    below, above = range(_LOWEST, low), range(max(high + 1, _LOWEST), _LAST + 1)
    return next((ports for ports in (below, above) if len(ports) >= _MIN_PORTS), range(_LOWEST, _LAST + 1))


def hold_port(host: str, port: int, *, is_alone: bool = False) -> socket.socket:
    """Keeps the kernel from giving the port away, until closed. A server can listen there all the same.

    Raises OSError where somebody listens already, or may not; where it has to be alone, also where another program
    holds it, whose server would find somebody there.
    """
    holder = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        # As servers do: only so can they listen beside it, and connections that linger in TIME_WAIT do not count.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, not is_alone)
        holder.bind((bare(host), port))
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except BaseException:
        holder.close()
        raise
    return holder


def is_port_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    try:
        hold_port(host, port).close()
    except OSError:
        return False
    return True


class PortDealer:
    """Gives each of `ports` once at most, in an order of chance, and none that another program holds."""

    def __init__(self, ports: Collection[int], rng: random.Random) -> None:
        self._left = rng.sample(list(ports), len(ports))

    def deal(self, host: str = LOOPBACK) -> socket.socket:
        """As of `hold_port`: until it is closed, no other program's dealer gives the port. Raises NoFreePort."""
        while self._left:
            with suppress(OSError):
                return hold_port(host, self._left.pop(), is_alone=True)
        raise NoFreePort(f"no port of {host} that this process has not given yet is free")


def hold_free_port(host: str = LOOPBACK) -> socket.socket:
    """Of a port that this process has not given before. Raises NoFreePort."""
    return _dealer().deal(host)


def free_port(host: str = LOOPBACK) -> int:
    """A port for a server that starts later, held until this process ends; another one at every call.

    Raises NoFreePort.
    """
    holder = hold_free_port(host)
    port: int = holder.getsockname()[1]
    holder.detach()  # nobody closes it
    return port


@cache
def _dealer() -> PortDealer:
    return PortDealer(server_ports(), random.Random())

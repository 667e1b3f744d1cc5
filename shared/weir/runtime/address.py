"""Where a server listens, and the address that others reach it by.

HOST:PORT     whoever reaches the port; port 0: any free one
unix:/PATH    processes of this machine that may open the folder, which is this user's alone
unix:/PATH/   the same, by a new name in that folder
"""

import secrets
import socket
import stat
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import grpc.aio

from weir.core.addresses import UNIX, bracketed, is_loopback, is_of_this_machine, is_unix
from weir.core.credentials import masked_url
from weir.core.errors import WeirError
from weir.runtime.private_folder import make_private_folder

SOCKET_SUFFIX = ".sock"
_WILDCARD_HOSTS = frozenset({"0.0.0.0", "[::]", "*"})
_UNFINISHED_PREFIX = ".s"
UNFINISHED_SOCKETS = _UNFINISHED_PREFIX + "?" * 8
"""Pattern of the names that Unix sockets have until they are published."""


class AddressInUse(WeirError):
    """The address cannot be listened on."""


class Listening:
    """What `bind` came to: `address` is what others reach the server by, from `publish` to `withdraw`.

    A port is there from the start. A Unix socket is bound by a name of its own, which only gRPC knows: gRPC removes
    the file of that name when it binds and when it ends, whoever's it is.
    """

    def __init__(self, address: str, unfinished: Path | None = None) -> None:
        self.address = address
        self._path = Path(address.removeprefix(UNIX))
        self._unfinished = unfinished
        self._inode = (0, 0) if unfinished is None else _inode_of(unfinished)

    def publish(self) -> None:
        """For a server that has started, and a process that owns what it serves. Raises AddressInUse."""
        if self._unfinished is not None:
            _check_unused(self._path)
            self._unfinished.rename(self._path)

    def withdraw(self) -> None:
        """For a server that has stopped. What another process has put in the place of a socket stays."""
        if self._unfinished is None:
            return
        self._unfinished.unlink(missing_ok=True)
        if self._path.exists() and _inode_of(self._path) == self._inode:
            self._path.unlink()


def bind(
    server: grpc.aio.Server,
    listen: str,
    advertise_host: str = "",
    credentials: grpc.ServerCredentials | None = None,
) -> Listening:
    """Raises AddressInUse, and UnsafeFolder for a Unix socket in a folder that others can write. `credentials`: of a
    port; a Unix socket has none.

    The folder of a Unix socket is made if need be, for this user alone.
    """
    if not is_unix(listen):
        return Listening(reachable_address(listen, _add_port(server, listen, listen, credentials), advertise_host))
    if listen.endswith("/"):
        listen += secrets.token_hex(4) + SOCKET_SUFFIX
    path = Path(listen.removeprefix(UNIX))
    make_private_folder(path.parent)
    _check_unused(path)
    unfinished = path.with_name(_UNFINISHED_PREFIX + secrets.token_hex(4))
    _add_port(server, f"{UNIX}{unfinished}", listen)
    return Listening(listen, unfinished)


def reachable_address(listen: str, port: int, advertise_host: str) -> str:
    """HOST:PORT; for a wildcard host this machine's name, unless `advertise_host` says better."""
    host = listen.rpartition(":")[0]
    if advertise_host:
        host = bracketed(advertise_host)
    elif host in _WILDCARD_HOSTS:
        host = socket.gethostname()
    return f"{host}:{port}"


def find_unreachable(address: str, nats_url: str) -> str | None:
    """A warning for a process that others find through a NATS of another machine, at an address that means this one:
    there it is nobody's, or somebody else's."""
    if is_of_this_machine(address) and not is_loopback(_host_of(nats_url)):
        return (
            f"processes of other machines that share the NATS at {masked_url(nats_url)} cannot reach {address}: if "
            "this instance has any, set listen to 0.0.0.0:PORT and advertise_host to a name of this machine"
        )
    return None


def _host_of(url: str) -> str:
    return urlsplit(url).hostname or ""


def _add_port(
    server: grpc.aio.Server, listen: str, name: str, credentials: grpc.ServerCredentials | None = None
) -> int:
    try:
        if credentials is not None:
            return int(server.add_secure_port(listen, credentials))
        return int(server.add_insecure_port(listen))
    except RuntimeError as error:
        raise AddressInUse(f"cannot listen on {name}: in use, or not an address of this machine") from error


def _check_unused(path: Path) -> None:
    """A socket of a process that is gone may be replaced, and nothing else."""
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise AddressInUse(f"cannot listen on unix:{path}: there is a file that is not a socket; remove it")
    with socket.socket(socket.AF_UNIX) as asking:
        asking.setblocking(False)
        try:
            asking.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except BlockingIOError:
            pass  # somebody listens, and has more callers than he answers
    raise AddressInUse(
        f"cannot listen on unix:{path}: in use by another process; stop it (`weir down`; `fuser {path}` names it), or "
        "choose another instance name"
    )


def _inode_of(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino

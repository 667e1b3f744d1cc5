"""Weights that all workers of a device map, and that one of them loads: slabs of memory, kept by the transfer service.

A slab is found by a key: a digest of all that its bytes depend on. On a Unix socket, one connection a user and slab:

    worker -> service   magic, the key's length, bytes of the slab; the key
    service -> worker   FILL     and the memory: nobody has it. This worker fills it and says SEALED; so does the answer
                        SEALED   and the memory: to be read only
                        REFUSED  and why: there is no memory for it

Whoever asks while another worker fills the slab waits. Should that one die first, the memory is dropped, and the next
worker fills a new slab. The connection stays open as long as the slab is used; a slab that nobody uses is kept for a
while, for a worker that starts again. Should the service die, workers keep what they have mapped; the next one knows
nothing of it, so a worker that starts then loads its own.
"""

import contextlib
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from weir.kv.memory.device import DeviceMemory, MemoryKind, listen_at, receive_exactly, receive_memory, send_memory

WEIGHTS_SOCKET = "weights.sock"
"""Beside the transfer service's other sockets."""
_log = logging.getLogger(__name__)
_REQUEST = struct.Struct("<4sHQ")
_MAGIC = b"WSLB"
_FILL, _SEALED, _REFUSED = b"F", b"S", b"R"
_MAX_KEY_BYTES = 512
_MAX_REASON_BYTES = 1024
_REQUEST_TIMEOUT_S = 5.0
_MAX_USERS = 256
_MAX_SLABS = 8
_CONNECT_PAUSE_S = 0.05
_ACCEPT_PAUSE_S = 0.2


class SlabRefused(Exception):
    """The service has no memory for it; the message says why."""


class SlabsAway(Exception):
    """No transfer service answers at the socket."""


@dataclass(slots=True)
class _Slab:
    """`memory` None: somebody is about to make it."""

    num_bytes: int
    memory: DeviceMemory | None = None
    is_sealed: bool = False
    num_users: int = 0
    unused_since_s: float = 0.0


class SlabServer:
    """The service's end. A thread a connection, at most 256; at most 8 slabs.

    `keep_s`: so long a slab is kept that nobody uses. `fill_s`: so long one may be filled, and be waited for.
    """

    def __init__(self, path: Path, kind: MemoryKind, *, keep_s: float = 60.0, fill_s: float = 600.0) -> None:
        self.path = path
        self._kind = kind
        self._keep_s = keep_s
        self._fill_s = fill_s
        self._slabs: dict[bytes, _Slab] = {}
        self._has_changed = threading.Condition()
        """Guards `_slabs`, `_connections` and `_is_closed`."""
        self._connections: set[socket.socket] = set()
        self._is_closed = False
        self._socket: socket.socket | None = None
        self._threads: list[threading.Thread] = []

    @property
    def num_bytes(self) -> int:
        """Of all slabs that there are."""
        with self._has_changed:
            return sum(slab.num_bytes for slab in self._slabs.values())

    @property
    def num_users(self) -> int:
        """Workers that map one, or fill it."""
        with self._has_changed:
            return sum(slab.num_users for slab in self._slabs.values())

    def start(self) -> None:
        """Raises OSError if there can be no socket at `path`; one that is there already is a dead service's."""
        listening = listen_at(self.path, _MAX_USERS)
        self._socket = listening
        self._begin(lambda: self._accept(listening))

    def close(self) -> None:
        """Workers that have mapped a slab keep it."""
        with self._has_changed:
            self._is_closed = True
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._has_changed.notify_all()
        if self._socket is not None:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
            for thread in list(self._threads):
                thread.join()
            self._socket.close()
            self._socket = None
            self.path.unlink(missing_ok=True)
        for slab in self._slabs.values():
            if slab.memory is not None:
                slab.memory.close()
        self._slabs.clear()

    def drop_unused(self) -> None:
        """Those that nobody has used for `keep_s`. To be called every now and then."""
        with self._has_changed:
            now_s = time.monotonic()
            for key, slab in list(self._slabs.items()):
                if slab.num_users == 0 and now_s >= slab.unused_since_s + self._keep_s:
                    self._drop(key)

    def _begin(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="weights", daemon=True)
        self._threads = [each for each in self._threads if each.is_alive()]
        self._threads.append(thread)
        thread.start()

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError as error:
                if self._is_closed:
                    return
                _log.error("no connection for weights could be taken: %s", error)
                time.sleep(_ACCEPT_PAUSE_S)  # without descriptors it would fail again at once
                continue
            with self._has_changed:
                if self._is_closed or len(self._connections) >= _MAX_USERS:
                    connection.close()
                    continue
                self._connections.add(connection)
                self._begin(lambda connection=connection: self._serve(connection))  # type: ignore[misc]

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(_REQUEST_TIMEOUT_S)
                magic, key_bytes, num_bytes = _REQUEST.unpack(receive_exactly(connection, _REQUEST.size))
                if magic != _MAGIC or not 0 < key_bytes <= _MAX_KEY_BYTES:
                    _log.warning("a request for weights that is none: not answered")
                    return
                self._answer(connection, receive_exactly(connection, key_bytes), num_bytes)
        except Exception:  # noqa: BLE001 - one worker's failure must not keep the others from their weights
            if not self._is_closed:
                _log.exception("a worker's request for weights failed")
        finally:
            with self._has_changed:
                self._connections.discard(connection)

    def _answer(self, connection: socket.socket, key: bytes, num_bytes: int) -> None:
        try:
            slab = self._use(key, num_bytes)
        except Exception as error:  # noqa: BLE001 - the worker is told
            reason = f"{type(error).__name__}: {error}".encode()[:_MAX_REASON_BYTES]
            connection.sendall(_REFUSED + len(reason).to_bytes(2, "little") + reason)
            return
        try:
            assert slab.memory is not None, "made before it is used"
            connection.sendall(_SEALED if slab.is_sealed else _FILL)
            send_memory(connection, slab.memory)
            connection.settimeout(self._fill_s)
            if not slab.is_sealed and connection.recv(1) == _SEALED:
                with self._has_changed:
                    slab.is_sealed = True
                    self._has_changed.notify_all()
                connection.sendall(_SEALED)
            connection.settimeout(None)
            if slab.is_sealed:
                connection.recv(1)  # until it is closed
        finally:
            self._leave(key, slab)

    def _use(self, key: bytes, num_bytes: int) -> _Slab:
        """A sealed slab, or a new one to be filled. Raises what making it raises, and SlabRefused."""
        with self._has_changed:
            is_settled = self._has_changed.wait_for(lambda: self._is_closed or self._is_settled(key), self._fill_s)
            if self._is_closed or not is_settled:
                raise SlabRefused("the service ends" if self._is_closed else f"not filled after {self._fill_s:g} s")
            slab = self._slabs.get(key)
            if slab is not None and slab.num_bytes != num_bytes:
                raise SlabRefused(f"num_bytes {num_bytes}: the slab of that key has {slab.num_bytes}")
            if slab is not None:
                slab.num_users += 1
                return slab
            self._make_room()
            slab = self._slabs[key] = _Slab(num_bytes, num_users=1)
        try:
            slab.memory = self._kind.create(num_bytes)
        except BaseException:
            with self._has_changed:
                self._drop(key)
            raise
        return slab

    def _is_settled(self, key: bytes) -> bool:
        slab = self._slabs.get(key)
        return slab is None or slab.is_sealed

    def _make_room(self) -> None:
        """Unused slabs go before a new one is made: memory of a device is scarce."""
        for key, slab in list(self._slabs.items()):
            if slab.num_users == 0:
                self._drop(key)
        if len(self._slabs) >= _MAX_SLABS:
            raise SlabRefused(f"{_MAX_SLABS} slabs are in use already; end workers of a model that is not needed")

    def _leave(self, key: bytes, slab: _Slab) -> None:
        with self._has_changed:
            slab.num_users -= 1
            slab.unused_since_s = time.monotonic()
            if not slab.is_sealed:
                self._drop(key)

    def _drop(self, key: bytes) -> None:
        slab = self._slabs.pop(key)
        if slab.memory is not None:
            try:
                slab.memory.close()
            except Exception:  # noqa: BLE001 - of a device that is lost, say: nobody uses it any more
                _log.exception("memory of weights could not be given back")
        self._has_changed.notify_all()


class SharedSlab:
    """A worker's mapping of a sealed slab. The service keeps the slab at least until `close`."""

    def __init__(self, memory: DeviceMemory, connection: socket.socket, *, was_filled_here: bool) -> None:
        self.memory = memory
        self._connection = connection
        self.was_filled_here = was_filled_here

    def close(self) -> None:
        """No view of the memory may be used any more."""
        self._connection.close()
        self.memory.close()


def fetch_slab(
    path: Path,
    key: str,
    num_bytes: int,
    kind: MemoryKind,
    fill: Callable[[DeviceMemory], None],
    *,
    connect_timeout_s: float = 30.0,
    fill_timeout_s: float = 600.0,
) -> SharedSlab:
    """Calls `fill` if this worker is the one to load it; what that raises is raised, and the next worker's turn comes.

    Raises SlabsAway if no service listens within `connect_timeout_s`, or one goes away; SlabRefused.
    """
    connection = _connect(path, time.monotonic() + connect_timeout_s)
    try:
        connection.settimeout(fill_timeout_s)
        name = key.encode()
        connection.sendall(_REQUEST.pack(_MAGIC, len(name), num_bytes) + name)
        answer = receive_exactly(connection, 1)
        if answer == _REFUSED:
            reason = receive_exactly(connection, int.from_bytes(receive_exactly(connection, 2), "little"))
            raise SlabRefused(reason.decode(errors="replace"))
        if answer == _SEALED:
            return SharedSlab(receive_memory(connection, kind.open_to_read), connection, was_filled_here=False)
        memory = receive_memory(connection, kind.open)
        try:
            fill(memory)
            connection.sendall(_SEALED)
            receive_exactly(connection, 1)
        except BaseException:
            memory.close()
            raise
        return SharedSlab(memory, connection, was_filled_here=True)
    except OSError as error:
        connection.close()
        raise SlabsAway(f"{path}: {error}") from error
    except BaseException:
        connection.close()
        raise


def _connect(path: Path, deadline_s: float) -> socket.socket:
    """The service may start at the same time."""
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(_REQUEST_TIMEOUT_S)
            connection.connect(str(path))
        except OSError as error:
            connection.close()
            if time.monotonic() >= deadline_s:
                raise SlabsAway(f"{path}: {error}") from error
            time.sleep(_CONNECT_PAUSE_S)
        else:
            return connection

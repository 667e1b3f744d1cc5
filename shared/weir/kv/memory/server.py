"""Where the transfer service hands the page memory of its arena to workers, and gets it back after a restart.

A gRPC call carries no descriptors, so this is a Unix socket of its own. One connection, one request:

    worker -> service   magic, what, arena id
    want                service -> worker   the memory's size and its descriptor; closed instead: there is none to give
    offer               worker -> service   the same; taken if the service has none

The memory lives as long as anybody maps it or holds its descriptor. Should the service die, its workers keep the memory
alive and offer it to the next service when they attach there.
"""

import contextlib
import logging
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

from weir.kv.memory.device import DeviceMemory, listen_at, receive_exactly, receive_memory, send_memory

_log = logging.getLogger(__name__)
_REQUEST = struct.Struct("<4sB32s")
_MAGIC = b"WPGM"
_WANT, _OFFER = 1, 2
_TIMEOUT_S = 5.0
MEMORY_SOCKET = "pages.sock"
"""Beside the transfer service's other sockets."""
_BACKLOG = 64

OpenMemory = Callable[[int, int], DeviceMemory]
"""Maps the memory behind a descriptor, of a number of bytes."""


class MemoryNotReady(Exception):
    """The service has no memory to give, or does not answer. Another attempt may find it."""


class MemoryServer:
    """The service's end. One connection at a time, in a thread of its own; a silent one is dropped after 5 s."""

    def __init__(
        self, path: Path, arena_id: str, num_bytes: int, open_memory: OpenMemory, memory: DeviceMemory | None
    ) -> None:
        """`memory`, at least `num_bytes`, is this object's from here on. None: some worker has it and will offer it."""
        self.path = path
        self._arena_id = arena_id.encode()
        self._num_bytes = num_bytes
        self._open_memory = open_memory
        self._memory = memory
        self._socket: socket.socket | None = None
        self._serving: threading.Thread | None = None

    @property
    def has_memory(self) -> bool:
        return self._memory is not None

    @property
    def memory(self) -> DeviceMemory | None:
        """None: some worker has it."""
        return self._memory

    def start(self) -> None:
        """Raises OSError if there can be no socket at `path`; one that is there already is a dead service's."""
        listening = listen_at(self.path, _BACKLOG)
        self._socket = listening
        self._serving = threading.Thread(target=self._serve, args=(listening,), name="page memory", daemon=True)
        self._serving.start()

    def close(self) -> None:
        """Workers that have the memory keep it."""
        if self._socket is not None and self._serving is not None:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
            self._serving.join()
            self._socket.close()
            self._socket = None
            self.path.unlink(missing_ok=True)
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _serve(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return  # closed
            with connection:
                connection.settimeout(_TIMEOUT_S)
                try:
                    self._answer(connection)
                except Exception:  # noqa: BLE001 - one worker's failure must not keep the others from their memory
                    _log.exception("a worker's request for page memory failed")

    def _answer(self, connection: socket.socket) -> None:
        magic, what, arena_id = _REQUEST.unpack(receive_exactly(connection, _REQUEST.size))
        if (magic, arena_id) != (_MAGIC, self._arena_id):
            _log.warning("a request for the page memory of another arena (%r): not answered", arena_id)
        elif what == _WANT and self._memory is not None:
            send_memory(connection, self._memory)
        elif what == _OFFER and self._memory is None:
            offered = receive_memory(connection, self._open_memory)
            if offered.num_bytes < self._num_bytes:
                _log.error("page memory of %d bytes was offered, needed are %d", offered.num_bytes, self._num_bytes)
                offered.close()
                return
            self._memory = offered
            _log.info("a worker gave the page memory back")


def fetch_memory(path: Path, arena_id: str, open_memory: OpenMemory) -> DeviceMemory:
    """A worker's own mapping. Raises MemoryNotReady, and what `open_memory` raises."""
    with _send_request(path, arena_id, _WANT) as connection:
        try:
            return receive_memory(connection, open_memory)
        except (ConnectionError, TimeoutError) as error:
            raise MemoryNotReady(f"{path} has no page memory to give: {error}") from error


def offer_memory(path: Path, arena_id: str, memory: DeviceMemory) -> None:
    """Tells a service that may have been restarted. Raises MemoryNotReady if it does not listen."""
    with _send_request(path, arena_id, _OFFER) as connection, contextlib.suppress(ConnectionError):  # it has the memory
        send_memory(connection, memory)


def _send_request(path: Path, arena_id: str, what: int) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_TIMEOUT_S)
        connection.connect(str(path))
        connection.sendall(_REQUEST.pack(_MAGIC, what, arena_id.encode()))
    except OSError as error:
        connection.close()
        raise MemoryNotReady(f"{path}: {error}") from error
    return connection

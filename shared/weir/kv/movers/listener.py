"""Where page streams are accepted: a thread that takes connections, and one for each of them."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

from weir.kv.movers.pipes import PagePipe, TcpPipe
from weir.kv.movers.source import PageSource

_log = logging.getLogger(__name__)
DEFAULT_IDLE_S = 5.0
MAX_STREAMS = 256
_BACKLOG = 64
_JOIN_S = 1.0
_NO_DESCRIPTOR_S = 0.1
OpenPipe = Callable[[socket.socket, float], PagePipe]
"""Of an accepted connection, within so many seconds. Raises OSError for one that does not prove who it is."""


class PageStreamListener:
    """Listens from the start until `close`. Raises OSError for an address that cannot be listened on."""

    def __init__(
        self,
        source: PageSource,
        host: str,
        port: int = 0,
        open_pipe: OpenPipe = TcpPipe,
        *,
        idle_s: float = DEFAULT_IDLE_S,
        max_streams: int = MAX_STREAMS,
    ) -> None:
        """`port` 0: any free one. `max_streams`: over it, connections are closed at once."""
        self._source = source
        self._open_pipe = open_pipe
        self._idle_s = idle_s
        self._free = threading.BoundedSemaphore(max_streams)
        self._lock = threading.Lock()
        self._ends: set[Callable[[], None]] = set()
        self._is_closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    @property
    def port(self) -> int:
        return int(self._listening.getsockname()[1])

    def close(self) -> None:
        """Ends all streams; may be called twice."""
        with self._lock:
            self._is_closed = True
            ends = tuple(self._ends)
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        for end in ends:
            end()
        self._accepting.join(_JOIN_S)
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._listening.accept()
            except OSError:  # closed, or no descriptor is free
                if self._is_closed:
                    return
                time.sleep(_NO_DESCRIPTOR_S)
                continue
            if not self._free.acquire(blocking=False):
                _log.warning("a page stream from %s is one too many", address[0])
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(self._idle_s)
            with self._owned(connection.close):
                pipe = self._open_pipe(connection, self._idle_s)
            with closing(pipe), self._owned(pipe.end):
                self._source.serve(pipe)
        except OSError as error:
            _log.warning("a page stream was not let in: %s", error)
        finally:
            connection.close()
            self._free.release()

    @contextmanager
    def _owned(self, end: Callable[[], None]) -> Iterator[None]:
        """Meanwhile `close` calls `end`. Raises OSError where that has been called already."""
        with self._lock:
            if self._is_closed:
                raise OSError("the listener is closed")
            self._ends.add(end)
        try:
            yield
        finally:
            with self._lock:
                self._ends.discard(end)

"""The page streams of one arena, both ways: those that others open here, and those that are opened to others."""

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from weir.kv.movers.listener import DEFAULT_IDLE_S, PageStreamListener
from weir.kv.movers.pipes import PagePipe, TcpPipe, TlsPipe, connect_tcp, connect_tls
from weir.kv.movers.source import PageSource
from weir.rpc.identities import dns_name_of
from weir.rpc.tls.certificates import Certificate
from weir.rpc.tls.page_streams import check_peer, client_context, server_context


class PageStreams(Protocol):
    """Any thread may use it; `connect` and `close` block."""

    @property
    def port(self) -> int:
        """Where others open theirs."""
        ...

    def connect(self, host: str, port: int, timeout_s: float) -> PagePipe:
        """To another arena's. Raises OSError."""
        ...

    def close(self) -> None:
        """Ends those that others opened; may be called twice."""
        ...


@dataclass(frozen=True)
class StreamsPort:
    """`host`: listened on; `port` 0: any free one. `certificate`: what this process has now; None: no TLS."""

    instance: str
    host: str
    port: int = 0
    certificate: Callable[[], Certificate] | None = None


class TcpPageStreams:
    """Over TCP, with TLS where there are certificates. Raises OSError where it cannot listen."""

    def __init__(self, where: StreamsPort, source: PageSource) -> None:
        self._where = where
        self._listener = PageStreamListener(source, where.host, where.port, open_pipe=self._open_pipe)

    @property
    def port(self) -> int:
        return self._listener.port

    def connect(self, host: str, port: int, timeout_s: float) -> PagePipe:
        where = self._where
        if where.certificate is None:
            return connect_tcp(host, port, timeout_s, DEFAULT_IDLE_S)
        context, name = client_context(where.certificate()), dns_name_of("transfer", where.instance)
        return connect_tls(host, port, timeout_s, DEFAULT_IDLE_S, context, name)

    def close(self) -> None:
        self._listener.close()

    def _open_pipe(self, connection: socket.socket, idle_s: float) -> PagePipe:
        where = self._where
        if where.certificate is None:
            return TcpPipe(connection, idle_s)
        secured = server_context(where.certificate()).wrap_socket(connection, server_side=True)
        try:
            check_peer(secured, where.instance, "transfer")
        except BaseException:
            secured.close()
            raise
        return TlsPipe(secured, idle_s)

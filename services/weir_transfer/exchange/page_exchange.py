"""What passes pages between this host and others, put together: the offers, their page streams, and what is fetched."""

import asyncio
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import grpc.aio

from weir.kv.movers.listener import DEFAULT_IDLE_S, PageStreamListener
from weir.kv.movers.pipes import PagePipe, TcpPipe, TlsPipe, connect_tcp, connect_tls
from weir.kv.movers.source import PageSource
from weir.rpc.channel import Dialer
from weir.rpc.identities import dns_name_of
from weir.rpc.tls.certificates import Certificate
from weir.rpc.tls.page_streams import check_peer, client_context, server_context
from weir.wire.v1 import pages_pb2_grpc
from weir_transfer.arena import ClaimedArena
from weir_transfer.change_signal import ChangeSignal
from weir_transfer.exchange.arena_pulls import ArenaPulls
from weir_transfer.exchange.pages_service import PagesService
from weir_transfer.exchange.prefix_fetcher import PrefixFetcher
from weir_transfer.exchange.running_sequences import RunningSequences
from weir_transfer.exchange.sequence_fetcher import SequenceFetcher
from weir_transfer.exchange.sequence_offers import SequenceOffers
from weir_transfer.remote_prefixes import RemotePrefixes


@dataclass(frozen=True)
class PagesPort:
    """Where other hosts reach this one: `listen` and `address`, HOST:PORT, of its `Pages`; page streams have a port of
    their own, 0: any free one. `certificate`: what this process has now; None: no TLS."""

    instance: str
    listen: str
    address: str
    dialer: Dialer
    certificate: Callable[[], Certificate] | None
    streams_port: int = 0


class PageExchange:
    """Of one arena. Raises OSError where its streams cannot be listened for."""

    def __init__(
        self,
        arena: ClaimedArena,
        remote: RemotePrefixes,
        running: RunningSequences,
        port: PagesPort,
        settled: ChangeSignal,
    ) -> None:
        rows = arena.segment.page_rows
        self._port = port
        self._source = PageSource(arena.pages.read, lambda page_id: int(rows["generation"][page_id]))
        host = port.listen.rpartition(":")[0].strip("[]")
        self._listener = PageStreamListener(self._source, host, port.streams_port, open_pipe=self._open_pipe)
        shown = f"{port.address.rpartition(':')[0]}:{self._listener.port}"
        sequences = SequenceOffers(remote, running, self._source, shown)
        self._servicer = PagesService(arena, remote, self._source, shown, settled, sequences)
        pulls = ArenaPulls(arena, self._connect)
        self.fetcher = PrefixFetcher(pulls, remote, port.dialer, settled)
        self.stager = SequenceFetcher(pulls, remote, port.dialer, settled)

    def add_to(self, server: grpc.aio.Server) -> None:
        pages_pb2_grpc.add_PagesServicer_to_server(self._servicer, server)

    def metrics(self) -> Mapping[str, float]:
        """Of what was asked for by others."""
        sent, gone = self._source.num_pages_sent, self._source.num_pages_gone
        return {"remote_pages_sent_total": float(sent), "remote_pages_gone_total": float(gone)}

    async def close(self) -> None:
        """From then on nobody writes into the arena's pages from elsewhere."""
        await self.fetcher.close()
        await self.stager.close()
        await asyncio.to_thread(self._listener.close)

    def _open_pipe(self, connection: socket.socket, idle_s: float) -> PagePipe:
        if self._port.certificate is None:
            return TcpPipe(connection, idle_s)
        secured = server_context(self._port.certificate()).wrap_socket(connection, server_side=True)
        try:
            check_peer(secured, self._port.instance, "transfer")
        except BaseException:
            secured.close()
            raise
        return TlsPipe(secured, idle_s)

    def _connect(self, host: str, port: int, timeout_s: float) -> PagePipe:
        if self._port.certificate is None:
            return connect_tcp(host, port, timeout_s, DEFAULT_IDLE_S)
        context, name = client_context(self._port.certificate()), dns_name_of("transfer", self._port.instance)
        return connect_tls(host, port, timeout_s, DEFAULT_IDLE_S, context, name)

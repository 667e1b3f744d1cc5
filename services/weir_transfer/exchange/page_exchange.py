"""What passes pages between this host and others, put together: the offers, their page streams, and what is fetched."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import grpc.aio

from weir.kv.memory.device import DeviceMemory
from weir.kv.movers.source import PageSource
from weir.rpc.channel import Dialer
from weir.wire.v1 import pages_pb2_grpc
from weir_transfer.arena import ClaimedArena
from weir_transfer.change_signal import ChangeSignal
from weir_transfer.exchange.arena_pulls import ArenaPulls
from weir_transfer.exchange.offered_from import OfferedFrom
from weir_transfer.exchange.page_streams import PageStreams
from weir_transfer.exchange.pages_service import PagesService
from weir_transfer.exchange.peer_memory import PeerMemories
from weir_transfer.exchange.prefix_fetcher import PrefixFetcher
from weir_transfer.exchange.running_sequences import RunningSequences
from weir_transfer.exchange.sequence_fetcher import SequenceFetcher
from weir_transfer.exchange.sequence_offers import SequenceOffers
from weir_transfer.remote_prefixes import RemotePrefixes


@dataclass(frozen=True)
class PagesPort:
    """Where other hosts reach this one: `address`, HOST:PORT, of its `Pages`; page streams have a port of their own.
    `open_streams`: has those of a source served; raises OSError. `open_memory`: maps memory of another arena's pages,
    on a device of this machine, to read it; None: nothing is mapped."""

    address: str
    dialer: Dialer
    open_streams: Callable[[PageSource], PageStreams]
    open_memory: Callable[[int, int], DeviceMemory] | None = None


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
        rows, server = arena.segment.page_rows, arena.memory_server
        self._source = PageSource(arena.pages.read, lambda page_id: int(rows["generation"][page_id]))
        self.streams = port.open_streams(self._source)
        shown = f"{port.address.rpartition(':')[0]}:{self.streams.port}"
        memory_path = "" if server is None else str(server.path)
        from_where = OfferedFrom(shown, arena.segment.arena_id, memory_path)
        sequences = SequenceOffers(remote, running, self._source)
        self._servicer = PagesService(arena, remote, self._source, from_where, settled, sequences)
        memories = PeerMemories(None if server is None else port.open_memory)
        pulls = ArenaPulls(arena, self.streams.connect, memories)
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
        await asyncio.to_thread(self.streams.close)

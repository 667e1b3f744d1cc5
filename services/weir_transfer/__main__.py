"""`python -m weir_transfer`: the transfer service of one host."""

import asyncio
import logging
import os
import sys
from functools import partial

from weir.bus.nats import NatsBus
from weir.bus.protocol import Bus
from weir.bus.subjects import Subjects
from weir.core.addresses import bare
from weir.core.clock import SystemClock
from weir.kv.memory.device import try_memory_kind
from weir.kv.prefixes import PrefixIndex
from weir.kv.tiers.page_header import PageLayout
from weir.runtime.address import bind
from weir.runtime.config import load_config
from weir.runtime.service import ServiceContext, run_service
from weir.wire.v1 import arena_pb2
from weir_transfer.arena import claim_arena
from weir_transfer.config import TransferConfig
from weir_transfer.exchange.page_exchange import PagesPort
from weir_transfer.exchange.page_streams import StreamsPort, TcpPageStreams
from weir_transfer.fence import try_open_process
from weir_transfer.prefix_events import PrefixEventPublisher
from weir_transfer.service import TransferService
from weir_transfer.tiers import open_tiers

_log = logging.getLogger(__name__)
_SERVICE_NAME = arena_pb2.DESCRIPTOR.services_by_name["Arena"].full_name


async def _build(context: ServiceContext[TransferConfig]) -> TransferService:
    # In a thread: pre-faulting takes seconds, in which the process must react to signals.
    arena = await asyncio.to_thread(claim_arena, context.config, try_open_process)
    _log.info("%s", arena.size_text)
    context.notes.append(arena.size_text)
    subjects, arena_id = Subjects(context.config.instance), arena.segment.arena_id

    async def connect() -> Bus:
        config = context.config
        return await NatsBus.connect(
            config.nats_url,
            name=context.process_id,
            seed_file=config.nats_seed_file,
            inbox=subjects.inbox("transfer"),
            ca_file=config.nats_ca_file,
        )

    def make_publisher(index: PrefixIndex) -> PrefixEventPublisher:
        incarnation = arena.segment.begin_incarnation()
        return PrefixEventPublisher(connect, subjects, arena_id, incarnation, index, context.tracer, SystemClock())

    service = TransferService(
        arena,
        context.config.arena_settings,
        try_open_process,
        context.tracer,
        context.request_shutdown,
        make_publisher,
    )
    context.resources.callback(service.release)
    pages_port = _try_bind_pages(context)
    if pages_port is not None:
        service.exchange_pages(pages_port)
    layout = PageLayout(arena.segment.model_digest, arena.segment.geometry.page_bytes)
    tiers = await asyncio.to_thread(open_tiers, context.config, layout, arena.pages)
    if tiers:
        service.keep_pages(tiers)
    service.add_to(context.grpc_server)
    return service


def _try_bind_pages(context: ServiceContext[TransferConfig]) -> PagesPort | None:
    """A further port of the same server. Raises AddressInUse."""
    config, tls = context.config, context.tls
    if not config.pages_listen:
        return None
    own = None if tls is None else tls.own
    credentials = None if tls is None else tls.peer_credentials
    address = bind(context.grpc_server, config.pages_listen, config.advertise_host, credentials).address
    certificate = None if own is None else lambda: own.current
    host = bare(config.pages_listen.rpartition(":")[0])
    streams = StreamsPort(config.instance, host, config.page_streams_port, certificate)
    kind = try_memory_kind(config.device)
    open_memory = None if kind is None else kind.open_to_read
    return PagesPort(address, context.dialer, partial(TcpPageStreams, streams), open_memory)


def main() -> int:
    config = load_config(TransferConfig, sys.argv[1:], environ=os.environ)
    return run_service("transfer", config, _build, [_SERVICE_NAME])


if __name__ == "__main__":
    sys.exit(main())

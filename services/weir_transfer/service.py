"""The transfer service put together: arena, core, fence and gRPC service, and the tick that drives them."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

import grpc.aio
from opentelemetry.trace import Tracer

from weir.core.clock import Clock, SystemClock
from weir.kv.movers.mover import SharedMemoryMover
from weir.kv.prefixes import PrefixIndex
from weir.runtime.admin import Description
from weir.wire.v1 import arena_pb2_grpc
from weir_transfer.arena import ClaimedArena
from weir_transfer.change_signal import ChangeSignal
from weir_transfer.core import ArenaCore
from weir_transfer.exchange.page_exchange import PageExchange, PagesPort
from weir_transfer.fence import Fence, OpenProcess
from weir_transfer.lease_keeper import Countdowns
from weir_transfer.messages import ArenaSettings
from weir_transfer.page_tier import PrefillMeter
from weir_transfer.prefix_events import PrefixEventPublisher
from weir_transfer.server import ArenaService
from weir_transfer.tier_keeper import PageTier, TierKeeper

_log = logging.getLogger(__name__)
_TICK_S = 0.05


class TransferService:
    """Build it inside the event loop that will serve: what is left of an earlier process is dealt with at once."""

    def __init__(
        self,
        arena: ClaimedArena,
        settings: ArenaSettings,
        open_process: OpenProcess,
        tracer: Tracer,
        request_shutdown: Callable[[str], None],
        make_publisher: Callable[[PrefixIndex], PrefixEventPublisher] | None = None,
        clock: Clock = SystemClock(),  # noqa: B008 - has no state
    ) -> None:
        """`make_publisher` makes what publishes the cached prefixes; None: nobody is interested."""
        self._arena = arena
        self._segment = arena.segment
        self._memory_server, self._slab_server = arena.memory_server, arena.slab_server
        self._request_shutdown = request_shutdown
        mover, settled = SharedMemoryMover(arena.segment.geometry.num_pages), ChangeSignal()
        self._settled = settled
        countdowns = Countdowns(clock, _TICK_S)
        self._is_tick_due = asyncio.Event()
        """Before its time."""
        self._core = ArenaCore(arena.segment, mover, countdowns, settings, settled.notify, self._is_tick_due.set)
        self._fence = Fence(open_process, self._on_exit)
        self._servicer = ArenaService(self._core, arena, settings, settled, self._fence, tracer)
        self._exchange: PageExchange | None = None
        self._keepers: list[TierKeeper] = []
        self._publisher = (
            make_publisher(self._core.prefixes) if make_publisher is not None and settings.keeps_prefixes else None
        )
        self._nobody_left = asyncio.Event()
        self._ticking: asyncio.Task[None] | None = None
        for lease in self._core.leases():
            handle = open_process(lease.process)
            if handle is None:
                self._on_exit(lease.lease_id)
            else:
                self._fence.watch(lease.lease_id, handle)

    def exchange_pages(self, port: PagesPort) -> None:
        """Has prefixes pass between this host and others; for before `add_to`. Raises OSError."""
        core = self._core
        self._exchange = PageExchange(self._arena, core.remote, core.running, port, self._settled)
        self._servicer.exchange_by(self._exchange.fetcher, self._exchange.stager, port.address)
        if self._publisher is not None:
            self._publisher.tell_of_fetches(self._exchange.fetcher.take_fetched)

    def keep_pages(self, tiers: Sequence[PageTier]) -> None:
        """Has full pages outlive their place in the arena in each of these, of which the first that has a page gives
        it; for before `start`."""
        remote, index, meter = self._core.remote, self._core.prefixes, PrefillMeter(SystemClock())
        remote.measure_by(meter)
        pages = self._arena.pages
        self._keepers = [TierKeeper(self._segment, pages, remote, index, meter, tier) for tier in tiers]
        self._servicer.load_by(self._keepers)

    def add_to(self, server: grpc.aio.Server) -> None:
        arena_pb2_grpc.add_ArenaServicer_to_server(self._servicer, server)
        if self._exchange is not None:
            self._exchange.add_to(server)

    async def start(self) -> None:
        """Countdowns run from here on."""
        if self._memory_server is not None:
            self._memory_server.start()
        if self._slab_server is not None:
            self._slab_server.start()
        self._ticking = asyncio.create_task(self._tick_for_ever())
        self._ticking.add_done_callback(self._on_tick_end)
        if self._publisher is not None:
            self._publisher.start()
        for keeper in self._keepers:
            keeper.start()

    async def drain(self, deadline_s: float) -> None:
        """Waits for the workers to leave: those who end work in an orderly way need the arena while they do."""
        self._nobody_left.clear()  # the next tick sees how it is now
        self._core.give_up_orphans()
        self._is_tick_due.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._nobody_left.wait(), deadline_s)

    async def stop(self) -> None:
        """The segment stays this service's until `release`."""
        if self._ticking is not None:
            self._ticking.cancel()
        if self._publisher is not None:
            await self._publisher.stop()
        self._servicer.close()
        if self._exchange is not None:
            await self._exchange.close()
        self._fence.close()
        await self._close_tiers()
        if self._memory_server is not None:
            await asyncio.to_thread(self._memory_server.close)
        if self._slab_server is not None:
            await asyncio.to_thread(self._slab_server.close)

    async def _close_tiers(self) -> None:
        """Of all that is closed it may take longest. What fails there keeps nothing else from being closed."""
        ends = await asyncio.gather(*(keeper.close() for keeper in self._keepers), return_exceptions=True)
        for keeper, error in zip(self._keepers, ends, strict=True):
            if error is not None:
                _log.error("the last pages are not in %s", keeper.name, exc_info=error)

    def release(self) -> None:
        """Removes the segment, unless somebody still has a lease: then the next transfer service goes on with it.

        For when nothing is served any more: from here on another transfer service can have this socket.
        """
        leases = self._core.leases()
        if leases:
            _log.warning("%d leases are left: %s stays for the next start", len(leases), self._segment.path)
        else:
            self._segment.unlink()
        self._segment.close()

    def describe(self) -> Description:
        events = self._publisher.metrics() if self._publisher is not None else {}
        slabs = self._slab_server
        weights = {} if slabs is None else {"weights_bytes": slabs.num_bytes, "weights_users": slabs.num_users}
        tiers = {name: value for keeper in self._keepers for name, value in keeper.metrics().items()}
        streams = self._exchange.metrics() if self._exchange is not None else {}
        metrics = {**self._core.metrics(), **events, **weights, **tiers, **streams}
        return Description(metrics, self._core.integrity_errors, map_pages=self._core.map_pages)

    async def _tick_for_ever(self) -> None:
        while True:
            self._servicer.announce(self._core.adopt_orphans())
            for lease_id in self._core.tick():
                _log.warning("lease %d has been silent for too long: its process is killed", lease_id)
                self._fence.kill(lease_id)
            if self._slab_server is not None:
                await asyncio.to_thread(self._slab_server.drop_unused)  # giving memory of a GPU back takes a while
            if not self._core.leases():
                self._nobody_left.set()
                if self._memory_server is not None and not self._memory_server.has_memory:
                    self._request_shutdown("the last worker that had the memory of this arena's pages is gone")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._core.plan_next_tick(_TICK_S)):
                    await self._is_tick_due.wait()
            self._is_tick_due.clear()

    def _on_tick_end(self, ticking: "asyncio.Task[None]") -> None:
        if not ticking.cancelled():
            _log.critical("the lease clock stopped", exc_info=ticking.exception())
            self._request_shutdown("the lease clock stopped")

    def _on_exit(self, lease_id: int) -> None:
        _log.info("the process of lease %d has exited", lease_id)
        self._core.end_lease(lease_id)

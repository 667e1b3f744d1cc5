"""The other processes of the stack, as the bus shows them, and what each says of itself when it is asked.

    registry    workers by id ──> address, and the address of their transfer service
    leader key  scheduler     ──> address

All of it is done when somebody scrapes, at rest nothing. Whoever does not answer in time is left out: nobody's old
figures are shown as if they were new.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import grpc.aio

from weir.bus.codec import MalformedMessage, decode
from weir.bus.messages import LEADER_KEY, LeaderRecord, WorkerRecord
from weir.bus.protocol import Bus, BusError, KvBucket, KvEntry
from weir.bus.subjects import Subjects
from weir.core.addresses import UNIX, is_unix
from weir.core.clock import Clock
from weir.rpc.channel import Dialer
from weir.rpc.figures import described_from_pb
from weir.rpc.identities import Party
from weir.telemetry.described import Described
from weir.telemetry.page_cache import PageCache
from weir.wire.v1 import admin_pb2, admin_pb2_grpc

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

logger = logging.getLogger(__name__)

_MAX_WORKERS = 1024
_BUS_TIMEOUT_S = 1.0
_MAX_AGE_S = 1.0
"""A gateway asks each process once a second at most, however many scrape it."""
_RecordT = TypeVar("_RecordT", bound="DataclassInstance")
_AnswerT = TypeVar("_AnswerT")
OperatorCall = Callable[["admin_pb2_grpc.AdminAsyncStub", float], Awaitable[_AnswerT]]
"""Of a process' Admin service, within so many seconds."""


@dataclass(frozen=True, slots=True)
class AskBounds:
    """How long the others are asked, and how many at once."""

    max_at_once: int = 32
    """So that requests go on beside a scrape of many."""
    call_timeout_s: float = 1.0
    total_timeout_s: float = 3.0
    """For all of them: whoever has not answered by then is left out."""


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Who answered. `workers` with the entry of the registry that each was found by."""

    workers: tuple[tuple[WorkerRecord, Described], ...] = ()
    others: tuple[Described, ...] = ()
    """Transfer services and the scheduler that leads."""
    registered: tuple[WorkerRecord, ...] = ()
    """Whether or not they answered."""

    @property
    def all(self) -> list[Described]:
        return [*(described for _, described in self.workers), *self.others]


class NeighbourWatch:
    """Asks when it is asked. The bus stays the caller's."""

    def __init__(
        self, bus: Bus, subjects: Subjects, dialer: Dialer, clock: Clock, bounds: AskBounds = AskBounds()
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._dialer = dialer
        self._version = dialer.version
        self._bounds = bounds
        self._workers: KvBucket | None = None
        self._leader: KvBucket | None = None
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._asking = asyncio.Semaphore(bounds.max_at_once)
        self._kept = PageCache[str, Neighbours](_MAX_AGE_S, clock.now_s)

    async def neighbours(self) -> Neighbours:
        """As of a second ago at most. Takes as long as the slowest, four seconds at most."""
        return await self._kept.page("", self._ask_all)

    async def close(self) -> None:
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    async def _ask_all(self) -> Neighbours:
        workers, scheduler_address = await self._find_all()
        asked: dict[str, Party] = {worker.address: "worker" for worker in workers}
        # A socket has the same name at each host: who is reached by its address is asked there.
        beside: dict[str, Party] = {worker.pages_address or worker.arena_address: "transfer" for worker in workers}
        beside[scheduler_address] = "scheduler"
        reachable = [address for address in sorted(beside) if address and _is_here(address)]
        asked |= {address: beside[address] for address in reachable}
        await self._drop_channels(asked.keys())
        found: dict[str, Described] = {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._bounds.total_timeout_s):
                await asyncio.gather(*(self._ask(address, party, found) for address, party in asked.items()))
        of_workers = [
            (worker, replace(found[worker.address], role=worker.role)) for worker in workers if worker.address in found
        ]
        others = tuple(found[address] for address in reachable if address in found)
        return Neighbours(tuple(of_workers), others, tuple(workers))

    async def ask_operators(self, call: OperatorCall[_AnswerT], addresses: Collection[str]) -> dict[str, _AnswerT]:
        """By address, of those who answer in time. At most one call to each of those that were found last."""
        found: dict[str, _AnswerT] = {}

        async def ask(address: str, channel: grpc.aio.Channel) -> None:
            async with self._asking:
                try:
                    found[address] = await call(admin_pb2_grpc.AdminStub(channel), self._bounds.call_timeout_s)
                except grpc.aio.AioRpcError as error:
                    logger.debug("%s does not answer operators: %s", address, error.code().name)

        channels = {address: self._channels[address] for address in addresses if address in self._channels}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._bounds.total_timeout_s):
                await asyncio.gather(*(ask(address, channel) for address, channel in channels.items()))
        return found

    async def _find_all(self) -> tuple[list[WorkerRecord], str]:
        """Workers, and the address of the scheduler that leads; empty: not known."""
        try:
            async with asyncio.timeout(_BUS_TIMEOUT_S):
                if self._workers is None:
                    self._workers = await self._bus.open_bucket(self._subjects.workers_bucket)
                if self._leader is None:
                    self._leader = await self._bus.open_bucket(self._subjects.leader_bucket)
                entries = await self._workers.list_entries()
                leader = await self._leader.get(LEADER_KEY)
        except (BusError, TimeoutError) as error:
            logger.debug("the other processes are not known: %s", error or "no answer")
            return [], ""
        workers = [record for entry in entries[:_MAX_WORKERS] if (record := _try_decode(WorkerRecord, entry))]
        leading = _try_decode(LeaderRecord, leader)
        return workers, "" if leading is None or leading.is_released else leading.address

    async def _ask(self, address: str, party: Party, found: dict[str, Described]) -> None:
        """Adds its answer to what is found, if it gives one."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._dialer.open(address, party)
        stub: admin_pb2_grpc.AdminAsyncStub = admin_pb2_grpc.AdminStub(channel)
        async with self._asking:
            try:
                request = admin_pb2.DescribeRequest(figures_only=True)
                answer = await stub.Describe(request, timeout=self._bounds.call_timeout_s)
            except grpc.aio.AioRpcError as error:
                logger.debug("%s does not say how it does: %s", address, error.code().name)
                return
        found[address] = described_from_pb(answer)

    async def _drop_channels(self, wanted: AbstractSet[str]) -> None:
        """Those of who is gone, and all when this process has a new certificate."""
        if self._version != self._dialer.version:
            self._version, wanted = self._dialer.version, set()
        for address in self._channels.keys() - wanted:
            await self._channels.pop(address).close(self._bounds.call_timeout_s)


def _is_here(address: str) -> bool:
    """A Unix socket is one of this host, or nobody's."""
    return not is_unix(address) or Path(address.removeprefix(UNIX)).exists()


def _try_decode(kind: type[_RecordT], entry: KvEntry | None) -> _RecordT | None:
    if entry is None or entry.value is None:
        return None
    try:
        return decode(kind, entry.value)
    except MalformedMessage as error:
        logger.debug("malformed entry %s: %s", entry.key, error)
        return None

"""The worker's side of the arena: pages and slots to and from the transfer service, under one lease.

An answer can get lost, and a call can arrive late. Both are healed by attaching again: each attachment has a number
that calls carry, calls of an ended one are refused, and with every new one the worker claims what it holds.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import grpc
import grpc.aio

from weir.core.errors import DeadlineExceeded, InternalError, Unavailable
from weir.core.life import Attempt
from weir.core.process import ProcessIdentity, own_identity
from weir.core.trace_context import inject
from weir.kv.arena.segment import Segment
from weir.kv.memory.device import ArenaMemory
from weir.kv.memory.server import OpenMemory
from weir.kv.messages import Acquired, HandedOff, HandOffReceipt, PageChain, PrefixMatch, PrefixSource
from weir.rpc.arena.lease_stream import Holdings, LeaseStream
from weir.rpc.channel import Dialer, PlainDialer
from weir.rpc.conversions import attempt_to_pb
from weir.rpc.errors import from_rpc_error
from weir.wire.v1 import arena_pb2, arena_pb2_grpc

__all__ = ["Acquired", "ArenaClient", "HandOffReceipt", "HandedOff", "WorkerIdentity"]

_CALL_TIMEOUT_S = 3.0
_CALL_DEADLINE_S = 10.0
_HAND_OFF_DEADLINE_S = 30.0
"""As long as a decode worker waits for a sequence that its gateway has asked for: later it would come in vain."""
_STAGE_TIMEOUT_S = 12.0
_RETRY_S = 0.05
_AnswerT = TypeVar("_AnswerT")
_WITHOUT_ANSWER = (
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
)
"""The attachment has ended, or the call may have happened."""


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """What a worker says of itself to get a lease. `page_bytes` of a page of its model, all layers."""

    worker_id: str
    role: str
    page_bytes: int
    model_digest: str


@dataclass(frozen=True)
class ArenaAccess:
    """How a process gets at its arena. `open_memory` maps page memory that is not in the segment; None for a worker
    that computes on the CPU. `identity`: of the process that is killed when its lease ends."""

    open_memory: OpenMemory | None = None
    dialer: Dialer = field(default_factory=PlainDialer)
    identity: ProcessIdentity = field(default_factory=own_identity)


class ArenaClient:
    """One lease. Make and use it in one event loop; that loop must not be blocked for longer than the lease lives.

    When `lost` is set the lease is gone and the process is about to be killed: it must stop writing and exit.
    """

    def __init__(
        self,
        socket_path: Path,
        worker: WorkerIdentity,
        on_handed_off: Callable[[HandedOff], None],
        access: ArenaAccess | None = None,
    ) -> None:
        """`on_handed_off` is called in the event loop, once for each sequence that comes to this lease."""
        access = access or ArenaAccess()
        registration = arena_pb2.Register(
            worker_id=worker.worker_id,
            role=worker.role,
            page_bytes=worker.page_bytes,
            model_digest=worker.model_digest,
            pid=access.identity.pid,
            pid_start_ticks=access.identity.start_ticks,
        )
        self._channel = access.dialer.open(f"unix:{socket_path}", "transfer")
        self._stub: arena_pb2_grpc.ArenaAsyncStub = arena_pb2_grpc.ArenaStub(self._channel)
        self._holdings = Holdings()
        self._sealing: set[asyncio.Future[None]] = set()
        self._handing_off: dict[asyncio.Future[None], Acquired] = {}
        self._stream = LeaseStream(self._stub, registration, self._holdings, on_handed_off, access.open_memory)

    @property
    def lost(self) -> asyncio.Event:
        return self._stream.lost

    @property
    def segment(self) -> Segment:
        """Raises RuntimeError before `start` has returned."""
        if self._stream.segment is None:
            raise RuntimeError("the segment is mapped between start() and close()")
        return self._stream.segment

    @property
    def memory(self) -> ArenaMemory:
        """The segment and, where its pages are on a device, these. Raises RuntimeError before `start` has returned."""
        return ArenaMemory(self.segment, self._stream.pages)

    @property
    def lease_id(self) -> int:
        """0 before the first attachment. Never changes after."""
        return self._stream.lease_id

    @property
    def keeps_prefixes(self) -> bool:
        """Whether the service has a prefix cache, by the newest attachment."""
        return self._stream.keeps_prefixes

    @property
    def pages_address(self) -> str:
        """HOST:PORT at which other hosts get pages of this arena; empty: nowhere."""
        return self._stream.pages_address

    async def start(self, timeout_s: float = 120.0) -> None:
        """Attaches and maps the segment; tries for `timeout_s`. Raises Unavailable, with the service's reason."""
        try:
            await self._stream.start(timeout_s)
        except BaseException:
            await self.close()
            raise

    def set_draining(self, *, is_draining: bool) -> None:
        """Whether this worker is to get nothing that others leave or give away."""
        self._stream.set_draining(is_draining=is_draining)

    async def acquire(self, num_pages: int, num_slots: int) -> Acquired:
        """All or nothing. Raises Overloaded when too little is free, Unavailable when the service stays away."""
        ends_at_s = _now_s() + _CALL_DEADLINE_S
        while True:
            attachment = await self._stream.wait_attached(ends_at_s)
            request = arena_pb2.AcquireRequest(
                lease_id=self.lease_id, attachment=attachment, num_pages=num_pages, num_slots=num_slots
            )
            answer = await self._try_once(attachment, self._stub.Acquire(request, timeout=_CALL_TIMEOUT_S))
            if answer is None:
                continue
            acquired = Acquired(tuple(answer.page_ids), tuple(answer.slots))
            await self._wait_handed_off(acquired, attachment, ends_at_s)
            # A newer attachment did not claim these pages, so the service has them back.
            if self._stream.is_current(attachment):
                self._holdings.add(acquired.page_ids, acquired.slots)
                return acquired

    async def match(
        self,
        hashes: Sequence[bytes],
        num_pages: int,
        num_slots: int,
        most_pages_ahead: int | None = None,
        source: PrefixSource | None = None,
    ) -> PrefixMatch:
        """Pins what is cached of a prompt with these page hashes, which needs `num_pages` pages and `num_slots` slots.

        Waits, within the service's bound, for pages that another request computes now, or that come from `source`. The
        rest comes along if it is free, of its pages `most_pages_ahead` at most. The match is given up by `release`
        unless all its pages get sealed. Raises Unavailable.
        """
        ends_at_s = _now_s() + _CALL_DEADLINE_S + self._stream.prefix_wait_s
        while True:
            attachment = await self._stream.wait_attached(ends_at_s)
            request = arena_pb2.MatchRequest(
                lease_id=self.lease_id,
                attachment=attachment,
                page_hashes=b"".join(hashes),
                num_pages=num_pages,
                num_slots=num_slots,
                most_pages_ahead=most_pages_ahead,
                fetch_from="" if source is None else source.address,
                fetch_is_expected=source is not None and source.is_expected,
            )
            timeout_s = _CALL_TIMEOUT_S + self._stream.prefix_wait_s
            headers = (("traceparent", source.traceparent),) if source is not None and source.traceparent else ()
            call = self._stub.Match(request, timeout=timeout_s, metadata=headers)
            answer = await self._try_once(attachment, call)
            if answer is None:
                continue
            acquired = Acquired(tuple(answer.page_ids), tuple(answer.slots))
            await self._wait_handed_off(acquired, attachment, ends_at_s)
            if self._stream.is_current(attachment):  # else as in `acquire`
                match = PrefixMatch(answer.match_id, tuple(answer.matched_page_ids), acquired)
                self._holdings.add((*match.page_ids, *acquired.page_ids), acquired.slots)
                return match

    async def seal(self, chain: PageChain) -> None:
        """Lets others read full pages that this worker has computed and still uses; it must not write them any more.

        A page for each hash. Raises Unavailable; nothing is lost by that but sharing.
        """
        sealed = asyncio.get_running_loop().create_future()
        self._sealing.add(sealed)
        try:
            attachment = await self._stream.wait_attached(_now_s() + _CALL_DEADLINE_S)
            request = arena_pb2.SealRequest(lease_id=self.lease_id, attachment=attachment, chain=_chain_to_pb(chain))
            if await self._try_once(attachment, self._stub.Seal(request, timeout=_CALL_TIMEOUT_S)) is None:
                raise Unavailable("whether pages were sealed is not known")
        finally:
            self._sealing.discard(sealed)
            sealed.set_result(None)

    async def release(
        self,
        page_ids: Sequence[int],
        slots: Sequence[int],
        chains: Sequence[PageChain] = (),
        match_ids: Sequence[int] = (),
    ) -> None:
        """Gives pages and slots back, clears the slots' records, gives matches up. Whatever is raised, they are gone.

        Pages of `chains` that have a hash are kept as a prefix. Raises ValueError for what is not held (then nothing is
        gone), Unavailable when the service stays away: it gets them back when it returns.
        """
        released = [*page_ids, *(page_id for chain in chains for page_id in chain.page_ids)]
        self._holdings.check(released, slots)
        for slot in slots:
            self.segment.record(slot).clear()
        ends_at_s = _now_s() + _CALL_DEADLINE_S
        try:
            await self._wait_sealed()
            attachment = await self._stream.wait_attached(ends_at_s)
        except BaseException:
            self._holdings.remove(released, slots)
            self._stream.renew()
            raise
        # Claimed up to here: had the attachment begun without them, this call would name what is given out anew.
        self._holdings.remove(released, slots)
        request = arena_pb2.ReleaseRequest(
            lease_id=self.lease_id,
            attachment=attachment,
            page_ids=page_ids,
            slots=slots,
            chains=[_chain_to_pb(chain) for chain in chains],
            match_ids=match_ids,
        )
        if await self._try_once(attachment, self._stub.Release(request, timeout=_CALL_TIMEOUT_S)) is None:
            # The next attachment does not name them as held, which releases them.
            await self._stream.wait_attached(ends_at_s)

    async def hand_off(
        self, slot: int, request_id: str, attempt: Attempt, to_worker_id: str, hashes: Sequence[bytes] = ()
    ) -> HandOffReceipt:
        """Passes the published sequence in `slot`, with the pages of its record, to another worker of the host; empty:
        to whichever adopts it, and InternalError also where none ever will.

        The first pages, those that have `hashes`, may serve others from here on.

        Raises Unavailable when the receiver has no lease, InternalError when record and call do not agree: then the
        sequence is still the caller's. Raises DeadlineExceeded when it cannot be known in time whether it was passed
        on: then, as when cancelled, slot and pages are the caller's no more and it must not release them.
        """
        summary = self.segment.record(slot).summarize()
        if summary is None:
            raise ValueError(f"slot {slot} has no published record")
        page_ids = summary.page_ids.tolist()
        self._holdings.begin_hand_off(slot, page_ids)
        settled, is_kept = asyncio.get_running_loop().create_future(), False
        self._handing_off[settled] = Acquired(tuple(page_ids), (slot,))
        try:
            await self._wait_sealed()
            return await self._hand_off(
                arena_pb2.HandOffRequest(
                    slot=slot,
                    request_id=request_id,
                    attempt=attempt_to_pb(attempt),
                    to_worker_id=to_worker_id,
                    page_hashes=b"".join(hashes),
                ),
                len(page_ids),
            )
        except (Unavailable, InternalError):
            is_kept = True
            raise
        except BaseException:
            self._stream.renew()  # the next attachment does not name the slot, which settles what becomes of it
            raise
        finally:
            self._holdings.end_hand_off(slot, is_kept=is_kept)
            del self._handing_off[settled]
            settled.set_result(None)

    async def stage(self, request_id: str, pages_address: str) -> AsyncGenerator[int]:
        """How many first pages of a sequence are here that runs in the arena whose `Pages` are at `pages_address`, each
        time that it is more. To be closed: until then they are kept here. Raises WeirError for what goes wrong."""
        request = arena_pb2.StageRequest(request_id=request_id, pages_address=pages_address)
        call = self._stub.Stage(request, timeout=_STAGE_TIMEOUT_S)
        try:
            async for answer in call:
                yield answer.num_pages
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()

    async def close(self) -> None:
        """Gives up the lease and all it holds. The process must not write into the arena from here on."""
        await self._stream.close()
        await self._channel.close()

    async def _hand_off(self, request: arena_pb2.HandOffRequest, num_pages: int) -> HandOffReceipt:
        """Repeats the call until it has an answer: a repeated one finds it done. The service knows the newest hand-off
        of each slot; should there have been others since, it refuses a repeated one, which was done for that reason:
        nothing else takes a slot or its record from a lease."""
        ends_at_s, may_be_done = _now_s() + _HAND_OFF_DEADLINE_S, False
        headers: dict[str, str] = {}
        inject(headers)
        while True:
            request.attachment = await self._stream.wait_attached(ends_at_s, DeadlineExceeded)
            request.lease_id = self.lease_id
            try:
                answer = await self._stub.HandOff(request, timeout=_CALL_TIMEOUT_S, metadata=tuple(headers.items()))
            except grpc.aio.AioRpcError as error:
                if error.code() == grpc.StatusCode.NOT_FOUND:
                    await self._wait_settled(ends_at_s)
                    raise Unavailable(f"no hand-off: {error.details()}") from error
                if may_be_done and error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                    if request.to_worker_id:
                        return HandOffReceipt(num_pages, num_bytes_copied=0)
                    # Also what says that nobody adopts anything any more: the next attachment settles which it is.
                    raise DeadlineExceeded(f"whether it was handed over is not known: {error.details()}") from error
                if error.code() not in _WITHOUT_ANSWER:
                    await self._wait_settled(ends_at_s)
                    raise InternalError(f"no hand-off: {error.details()}") from error
                may_be_done |= error.code() != grpc.StatusCode.ABORTED
                if _now_s() >= ends_at_s:
                    raise DeadlineExceeded(f"no hand-off within {_HAND_OFF_DEADLINE_S} s: {error.details()}") from error
                await asyncio.sleep(_RETRY_S)
            else:
                return HandOffReceipt(answer.num_pages, answer.num_bytes_copied)

    async def _wait_settled(self, ends_at_s: float) -> None:
        """Before a sequence is the caller's again, which may clear its record: an attachment that has begun meanwhile
        names it as being handed off, and has its pages kept by what the record says. Raises DeadlineExceeded."""
        await self._stream.wait_attached(ends_at_s, DeadlineExceeded)

    async def _wait_sealed(self) -> None:
        """A Seal that arrived after its pages were released would name pages that hold something else by then."""
        if self._sealing:
            await asyncio.wait(self._sealing)

    async def _wait_handed_off(self, acquired: Acquired, attachment: int, ends_at_s: float) -> None:
        """What is given out anew while the answer to its hand-off is still awaited is in use here until that has come.
        Raises Unavailable when it does not: then what was acquired goes back. Cancelled: it does too."""
        page_ids, slots = set(acquired.page_ids), set(acquired.slots)
        while waiting := [
            settled
            for settled, given in self._handing_off.items()
            if not (page_ids.isdisjoint(given.page_ids) and slots.isdisjoint(given.slots))
        ]:
            try:
                done, _ = await asyncio.wait(waiting, timeout=max(0.0, ends_at_s - _now_s()))
            except asyncio.CancelledError:
                self._stream.renew(attachment)
                raise
            if not done:
                self._stream.renew(attachment)
                raise Unavailable("pages came back before it was known that they were handed off")

    async def _try_once(self, attachment: int, call: Awaitable[_AnswerT]) -> _AnswerT | None:
        """None: the answer is lost, or the attachment has ended; a new one is under way then."""
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            if error.code() not in _WITHOUT_ANSWER:
                raise from_rpc_error(error) from error
            self._stream.renew(attachment)
            return None
        except asyncio.CancelledError:
            self._stream.renew(attachment)
            raise


def _chain_to_pb(chain: PageChain) -> arena_pb2.PageChain:
    return arena_pb2.PageChain(
        page_ids=chain.page_ids,
        page_hashes=b"".join(chain.hashes),
        earlier_page_hashes=b"".join(chain.earlier_hashes),
    )


def _now_s() -> float:
    return asyncio.get_running_loop().time()

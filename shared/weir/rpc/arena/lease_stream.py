"""Keeps one lease: attaches, sends heartbeats, attaches again after a break, claims what is held, and takes what is
handed off to it.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from weir.core.clock import Backoff
from weir.core.errors import Unavailable, WeirError
from weir.core.process import own_pid_namespace
from weir.core.tasks import end_tasks
from weir.kv.arena.segment import Segment, SegmentError
from weir.kv.layout import SegmentMismatch
from weir.kv.memory.cuda import CudaDriverError
from weir.kv.memory.device import DeviceMemory
from weir.kv.memory.server import MemoryNotReady, OpenMemory, fetch_memory, offer_memory
from weir.kv.messages import Claims, HandedOff
from weir.rpc.conversions import attempt_from_pb
from weir.wire.v1 import arena_pb2, arena_pb2_grpc

_log = logging.getLogger(__name__)
_ATTACH_TIMEOUT_S = 5.0
_DETACH_TIMEOUT_S = 2.0
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 0.5
_REFUSED = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT)
_AttachCall = grpc.aio.StreamStreamCall[arena_pb2.AttachRequest, arena_pb2.AttachResponse]


class Holdings:
    """What a worker holds: pages, slots, and the slots (with their pages) whose hand-off has no answer yet.

    A shared page is held as often as sequences of this worker use it.
    """

    def __init__(self) -> None:
        self._page_ids: Counter[int] = Counter()
        self._slots: set[int] = set()
        self._handing_off: dict[int, tuple[int, ...]] = {}

    def claims(self) -> Claims:
        return Claims(
            tuple(sorted(self._page_ids.elements())), tuple(sorted(self._slots)), tuple(sorted(self._handing_off))
        )

    def holds_slot(self, slot: int) -> bool:
        return slot in self._slots

    def add(self, page_ids: Iterable[int], slots: Iterable[int]) -> None:
        self._page_ids.update(page_ids)
        self._slots.update(slots)

    def check(self, page_ids: Iterable[int], slots: Iterable[int]) -> None:
        """Raises ValueError for anything that is not held."""
        missing = [page_id for page_id, count in Counter(page_ids).items() if self._page_ids[page_id] < count]
        if missing or not self._slots.issuperset(slots):
            raise ValueError(f"not held: pages {sorted(missing)}, slots {sorted(set(slots) - self._slots)}")

    def remove(self, page_ids: Iterable[int], slots: Iterable[int]) -> None:
        """Raises ValueError, with nothing changed, for anything that is not held."""
        pages, removed_slots = Counter(page_ids), set(slots)
        self.check(pages.elements(), removed_slots)
        for page_id, count in pages.items():
            self._page_ids[page_id] -= count
            if not self._page_ids[page_id]:
                del self._page_ids[page_id]
        self._slots -= removed_slots

    def begin_hand_off(self, slot: int, page_ids: Iterable[int]) -> None:
        """Raises ValueError, with nothing changed, for anything that is not held."""
        pages = tuple(page_ids)
        self.remove(pages, [slot])
        self._handing_off[slot] = pages

    def end_hand_off(self, slot: int, *, is_kept: bool) -> None:
        """The hand-off was refused (`is_kept`), or it is not this worker's sequence any more."""
        pages = self._handing_off.pop(slot)
        if is_kept:
            self.add(pages, [slot])


class _AttachRefused(Exception):
    """The service will not give this worker its lease."""


class LeaseStream:
    """The `Attach` stream of a worker and what it stands for. An attachment lasts as long as one such stream.

    `registration` names the worker and its process; `holdings` is read when each attachment begins and grows by
    hand-offs.
    """

    def __init__(
        self,
        stub: "arena_pb2_grpc.ArenaAsyncStub",
        registration: arena_pb2.Register,
        holdings: Holdings,
        on_handed_off: Callable[[HandedOff], None],
        open_memory: OpenMemory | None,
    ) -> None:
        self.lost = asyncio.Event()
        self.segment: Segment | None = None
        self.pages: DeviceMemory | None = None
        self.lease_id = 0
        self.keeps_prefixes = False
        self.pages_address = ""
        self.prefix_wait_s = 0.0
        self._stub = stub
        self._registration = registration
        self._holdings = holdings
        self._on_handed_off = on_handed_off
        self._open_memory = open_memory
        self._attachment = 0
        self._settled = asyncio.Event()
        """Set while attached, and for good when lost."""
        self._refusal = ""
        self._is_renewal_wanted = False
        self._backoff = Backoff(_FIRST_BACKOFF_S, _MAX_BACKOFF_S)
        self._call: _AttachCall | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._is_draining = False
        self._is_given_up = False
        self._has_news = asyncio.Event()

    def set_draining(self, *, is_draining: bool) -> None:
        """Said at once, and with every heartbeat from here on."""
        self._is_draining = is_draining
        self._has_news.set()

    async def start(self, timeout_s: float) -> None:
        """Returns when attached and mapped. Raises Unavailable."""
        self._registration.pid_namespace = own_pid_namespace()
        self._keeping = asyncio.create_task(self._keep_attached())
        self._keeping.add_done_callback(self._on_keeping_end)
        await self.wait_attached(asyncio.get_running_loop().time() + timeout_s)

    async def wait_attached(self, ends_at_s: float, too_late: type[WeirError] = Unavailable) -> int:
        """The number of the present attachment. Raises `too_late` when there is none by then or will be none."""
        if not self._settled.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._settled.wait(), ends_at_s - asyncio.get_running_loop().time())
        if self.lost.is_set():
            raise too_late(f"the transfer service refuses this worker: {self._refusal}")
        if not self._attachment:
            raise too_late("the transfer service does not answer")
        return self._attachment

    def is_current(self, attachment: int) -> bool:
        return attachment == self._attachment

    def renew(self, attachment: int | None = None) -> None:
        """Sees to it that an attachment begins which claims what is held now; None: whatever the present one is."""
        self._is_renewal_wanted = True
        if self._call is not None and self._attachment and attachment in (None, self._attachment):
            self._unsettle()
            self._call.cancel()

    async def close(self) -> None:
        """Gives the lease up. A service that stays away is not waited for: it will find the process gone."""
        if self.lease_id and self._keeping is not None and not self._keeping.done():
            with suppress(WeirError, grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
                await asyncio.wait_for(self._detach(), _DETACH_TIMEOUT_S)
        if self._keeping is not None:
            await end_tasks([self._keeping])
        if self.pages is not None:
            self.pages.close()
            self.pages = None
        if self.segment is not None:
            self.segment.close()
            self.segment = None

    async def _detach(self) -> None:
        await self.wait_attached(asyncio.get_running_loop().time() + _DETACH_TIMEOUT_S)
        self._is_given_up = True
        if self._call is not None:
            await self._call.write(arena_pb2.AttachRequest(detach=arena_pb2.Detach()))
            await self._call.code()

    async def _keep_attached(self) -> None:
        while not self.lost.is_set():
            try:
                await self._attach_and_listen()
            except _AttachRefused as error:
                self._lose(str(error))
                return
            except (grpc.aio.AioRpcError, TimeoutError, MemoryNotReady) as error:
                _log.warning("not attached to the transfer service: %s", _reason(error))
            except asyncio.CancelledError:
                # A call that `renew` cancelled raises this too; then nobody asked this task to end.
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
            await asyncio.sleep(self._backoff.next_delay_s())

    def _on_keeping_end(self, keeping: "asyncio.Task[None]") -> None:
        """A lease that nobody keeps is lost."""
        if not keeping.cancelled() and (error := keeping.exception()) is not None:
            _log.critical("the arena's lease cannot be kept", exc_info=error)
            self._lose(f"defect: {error!r}")

    def _lose(self, refusal: str) -> None:
        _log.error("worker %s has no lease: %s", self._registration.worker_id, refusal)
        self._refusal = refusal
        self.lost.set()
        self._settled.set()

    def _unsettle(self) -> None:
        self._settled.clear()
        self._attachment = 0

    async def _attach_and_listen(self) -> None:
        """One attachment, from Register to the end of its stream."""
        call = self._call = self._stub.Attach()
        heartbeats: asyncio.Task[None] | None = None
        try:
            attached = await asyncio.wait_for(self._register(call), _ATTACH_TIMEOUT_S)
            heartbeats = asyncio.create_task(self._send_heartbeats(call, attached.heartbeat_interval_ms / 1000))
            self.lease_id = self._registration.lease_id = attached.lease_id
            if self.segment is None:
                self.segment = await _map(Path(attached.segment_path))
            if attached.memory_socket_path:
                await self._share_pages(Path(attached.memory_socket_path), self.segment)
            self.keeps_prefixes, self.prefix_wait_s = attached.keeps_prefixes, attached.prefix_wait_ms / 1000
            self.pages_address = attached.pages_address
            self._backoff.reset()
            if self._is_renewal_wanted:
                return
            self._attachment = attached.attachment
            self._settled.set()
            for sequence in attached.handed_off_sequences:
                self._take(sequence, self.segment)
            while (message := await _read(call)) is not None:
                self._take(message.sequence_handed_off, self.segment)
        finally:
            self._unsettle()
            call.cancel()
            if heartbeats is not None:
                heartbeats.cancel()

    async def _share_pages(self, memory_socket_path: Path, segment: Segment) -> None:
        """Maps the page memory; or, at a later attachment, offers it: this may be a new service, which has none."""
        if self.pages is not None:
            await asyncio.to_thread(offer_memory, memory_socket_path, segment.arena_id, self.pages)
            return
        if self._open_memory is None:
            raise _AttachRefused("the pages of its arena are on a device, and this worker computes on the CPU")
        try:
            self.pages = await asyncio.to_thread(fetch_memory, memory_socket_path, segment.arena_id, self._open_memory)
        except (ValueError, OSError, CudaDriverError) as error:
            raise _AttachRefused(f"its page memory cannot be mapped from here: {error}") from error

    async def _register(self, call: _AttachCall) -> arena_pb2.Attached:
        """The claims are those of this moment: answers to calls of the attachment before count no more from here."""
        self._unsettle()
        self._is_renewal_wanted = False
        claims = self._holdings.claims()
        register = arena_pb2.Register(
            held_page_ids=claims.page_ids, held_slots=claims.slots, handing_off_slots=claims.handing_off_slots
        )
        register.MergeFrom(self._registration)
        try:
            await call.write(arena_pb2.AttachRequest(register=register))
            message = await _read(call)
        except grpc.aio.AioRpcError as error:
            if error.code() in _REFUSED:
                raise _AttachRefused(error.details()) from error
            raise
        except asyncio.InvalidStateError:  # all that `write` raises for a call that has ended
            message = None
        if message is None:
            if await call.code() in _REFUSED:
                raise _AttachRefused(await call.details())
            raise TimeoutError(f"the stream ended before the service answered: {await call.details()}")
        return message.attached

    async def _send_heartbeats(self, call: _AttachCall, interval_s: float) -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the stream ended: its reader deals with that
            while True:
                self._has_news.clear()
                heartbeat = arena_pb2.Heartbeat(is_draining=self._is_draining)
                await call.write(arena_pb2.AttachRequest(heartbeat=heartbeat))
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._has_news.wait(), interval_s)

    def _take(self, sequence: arena_pb2.SequenceHandedOff, segment: Segment) -> None:
        if self._is_given_up or self._holdings.holds_slot(sequence.slot):
            return  # announced too late, when others may have it already; or twice
        summary = segment.record(sequence.slot).summarize()
        if summary is None:
            _log.error("slot %d was handed off without a whole record: it goes back", sequence.slot)
            self.renew()
            return
        self._holdings.add(summary.page_ids.tolist(), [sequence.slot])
        attempt = attempt_from_pb(sequence.attempt)
        self._on_handed_off(HandedOff(sequence.slot, sequence.slot_generation, sequence.request_id, attempt))


async def _map(path: Path) -> Segment:
    try:
        return await asyncio.to_thread(Segment.open, path)
    except (OSError, SegmentError, SegmentMismatch) as error:
        raise _AttachRefused(f"its segment {path} cannot be mapped from here: {error}") from error


async def _read(call: _AttachCall) -> arena_pb2.AttachResponse | None:
    """None at the end of the stream."""
    message: Any = await call.read()
    return None if message is grpc.aio.EOF else message


def _reason(error: Exception) -> str:
    return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else str(error)

"""The gRPC face of the core: conversion, statuses of refusals, one outbox an attachment.

Overloaded passes through: the interceptor that every server has gives it its status and its retry hint.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import grpc
import grpc.aio
from opentelemetry.trace import Tracer

from weir.kv.arena.segment import Segment
from weir.kv.messages import PrefixMatch
from weir.kv.states import NotOwned
from weir.wire.v1 import arena_pb2, arena_pb2_grpc
from weir_transfer.bell import ChangeSignal
from weir_transfer.convert import (
    chain_from_pb,
    chains_from_pb,
    handed_off_to_pb,
    match_from_pb,
    order_from_pb,
    registration_from_pb,
)
from weir_transfer.core import ArenaCore
from weir_transfer.fence import Fence, OpenProcess, ProcessHandle
from weir_transfer.lease_keeper import LeaseTimes
from weir_transfer.orders import Announcement, Attachment, MatchOrder, PrefixSettings
from weir_transfer.outbox import AnnouncementQueue
from weir_transfer.refusals import (
    ArenaRefusal,
    AttachRefused,
    ReceiverAway,
    ReceiverGone,
    RecordMismatch,
    StaleAttachment,
)

_log = logging.getLogger(__name__)
_REGISTER_TIMEOUT_S = 5.0
_WAIT_FROM_PAGES = 4
"""Fewer are computed sooner than waited for."""
_CODES: dict[type[Exception], grpc.StatusCode] = {
    AttachRefused: grpc.StatusCode.FAILED_PRECONDITION,
    NotOwned: grpc.StatusCode.FAILED_PRECONDITION,
    RecordMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    StaleAttachment: grpc.StatusCode.ABORTED,
    ReceiverAway: grpc.StatusCode.UNAVAILABLE,
    ReceiverGone: grpc.StatusCode.NOT_FOUND,
    ValueError: grpc.StatusCode.INVALID_ARGUMENT,
}

_Context = grpc.aio.ServicerContext[Any, Any]
_Requests = AsyncIterator[arena_pb2.AttachRequest]


class ArenaService(arena_pb2_grpc.ArenaServicer):
    """`weir.v1.Arena`."""

    def __init__(
        self,
        core: ArenaCore,
        segment: Segment,
        times: LeaseTimes,
        prefix_settings: PrefixSettings,
        settled: ChangeSignal,
        fence: Fence,
        open_process: OpenProcess,
        tracer: Tracer,
        memory_socket_path: Path | None = None,
    ) -> None:
        """`settled` rings when a match that had to wait may find more now."""
        self._core = core
        self._settled = settled
        self._prefix_wait_s = prefix_settings.wait_ms / 1000
        self._fence = fence
        self._open_process = open_process
        self._tracer = tracer
        self._pid_namespace = segment.pid_namespace
        self._max_announcements = segment.geometry.num_slots
        self._announcements: dict[int, AnnouncementQueue] = {}
        self._attached = arena_pb2.Attached(
            segment_path=str(segment.path),
            heartbeat_interval_ms=times.heartbeat_interval_ms,
            lease_ttl_ms=times.lease_ttl_ms,
            keeps_prefixes=prefix_settings.is_on,
            prefix_wait_ms=prefix_settings.wait_ms,
            memory_socket_path=str(memory_socket_path or ""),
        )

    def close(self) -> None:
        """Ends every stream. The leases stay."""
        for announcements in self._announcements.values():
            announcements.close()

    async def Attach(  # noqa: N802 - names on the wire
        self, request_iterator: _Requests, context: _Context
    ) -> AsyncIterator[arena_pb2.AttachResponse]:
        register = await self._receive_register(request_iterator, context)
        try:
            attachment = self._attach(register)
        except AttachRefused as error:
            _log.warning("worker %s (pid %s) was refused: %s", register.worker_id, register.pid, error)
            await _abort(context, error)
        _log.info("worker %s has lease %d, attachment %d", register.worker_id, attachment.lease_id, attachment.number)
        announcements = self._replace_announcements(attachment.lease_id)
        listening = asyncio.create_task(self._listen(request_iterator, attachment, announcements))
        try:
            yield arena_pb2.AttachResponse(attached=self._attached_to_pb(attachment))
            while (message := await announcements.next()) is not None:
                yield message
        finally:
            listening.cancel()
            self._break_stream(attachment, announcements)
            with contextlib.suppress(asyncio.CancelledError):
                await listening

    async def Acquire(  # noqa: N802
        self, request: arena_pb2.AcquireRequest, context: _Context
    ) -> arena_pb2.AcquireResponse:
        try:
            acquired = self._core.acquire(request.lease_id, request.attachment, request.num_pages, request.num_slots)
        except ArenaRefusal as error:
            await _abort(context, error)
        return arena_pb2.AcquireResponse(page_ids=acquired.page_ids, slots=acquired.slots)

    async def Release(  # noqa: N802
        self, request: arena_pb2.ReleaseRequest, context: _Context
    ) -> arena_pb2.ReleaseResponse:
        try:
            chains, match_ids = chains_from_pb(request), tuple(request.match_ids)
            self._core.release(request.lease_id, request.attachment, chains, tuple(request.slots), match_ids)
        except (ArenaRefusal, NotOwned, ValueError) as error:
            await _abort(context, error)
        return arena_pb2.ReleaseResponse()

    async def Match(  # noqa: N802
        self, request: arena_pb2.MatchRequest, context: _Context
    ) -> arena_pb2.MatchResponse:
        try:
            match = await self._match(request.lease_id, request.attachment, match_from_pb(request))
        except (ArenaRefusal, ValueError) as error:
            await _abort(context, error)
        return arena_pb2.MatchResponse(
            matched_page_ids=match.page_ids,
            page_ids=match.acquired.page_ids,
            slots=match.acquired.slots,
            match_id=match.match_id,
        )

    async def Seal(  # noqa: N802
        self, request: arena_pb2.SealRequest, context: _Context
    ) -> arena_pb2.SealResponse:
        try:
            self._core.seal(request.lease_id, request.attachment, chain_from_pb(request.chain))
        except (ArenaRefusal, NotOwned, ValueError) as error:
            await _abort(context, error)
        return arena_pb2.SealResponse()

    async def HandOff(  # noqa: N802
        self, request: arena_pb2.HandOffRequest, context: _Context
    ) -> arena_pb2.HandOffResponse:
        with self._tracer.start_as_current_span("hand_off") as span:
            try:
                committed = self._core.hand_off(request.lease_id, request.attachment, order_from_pb(request))
            except (ArenaRefusal, NotOwned, ValueError) as error:
                await _abort(context, error)
            receipt = committed.receipt
            span.set_attribute("weir.request_id", request.request_id)
            span.set_attribute("weir.num_pages", receipt.num_pages)
            span.set_attribute("weir.num_bytes_copied", receipt.num_bytes_copied)
        if committed.announcement is not None:
            self._announce(committed.announcement)
        return arena_pb2.HandOffResponse(num_pages=receipt.num_pages, num_bytes_copied=receipt.num_bytes_copied)

    async def _match(self, lease_id: int, attachment: int, order: MatchOrder) -> PrefixMatch:
        """Waits as long as another request is computing the same pages, holding nothing meanwhile."""
        loop = asyncio.get_running_loop()
        ends_at_s = loop.time() + self._prefix_wait_s
        wait_from_pages = _WAIT_FROM_PAGES
        while True:
            left_s = ends_at_s - loop.time()
            limit = wait_from_pages if left_s > 0 else None
            match = self._core.match(lease_id, attachment, order, wait_from_pages=limit)
            if match is not None:
                return match
            await self._settled.wait(left_s)
            wait_from_pages = 1  # of a prefix that is computed in steps, the end is as near as the rest was

    async def _receive_register(self, requests: _Requests, context: _Context) -> arena_pb2.Register:
        try:
            first = await asyncio.wait_for(anext(requests), _REGISTER_TIMEOUT_S)
        except (TimeoutError, StopAsyncIteration):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"no Register within {_REGISTER_TIMEOUT_S} s")
        if first.WhichOneof("message") != "register":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "message: the first one must be Register")
        return first.register

    def _attach(self, register: arena_pb2.Register) -> Attachment:
        with self._opened(register) as handle:
            attachment = self._core.attach(registration_from_pb(register))
            self._fence.watch(attachment.lease_id, handle)
        return attachment

    @contextmanager
    def _opened(self, register: arena_pb2.Register) -> Iterator[ProcessHandle]:
        """The process that registers; whoever cannot be killed gets no lease."""
        if register.pid_namespace != self._pid_namespace:
            raise AttachRefused(
                f"worker {register.worker_id} runs in another pid namespace ({register.pid_namespace}, the transfer "
                f"service in {self._pid_namespace}), so it could not be fenced: let them share one "
                f'(in Compose `pid: "service:…"`, on Kubernetes shareProcessNamespace)'
            )
        registration = registration_from_pb(register)
        handle = self._open_process(registration.process)
        if handle is None:
            raise AttachRefused(f"{registration.process} of worker {register.worker_id} does not exist")
        try:
            yield handle
        except BaseException:
            handle.close()
            raise

    async def _listen(self, requests: _Requests, attachment: Attachment, announcements: AnnouncementQueue) -> None:
        try:
            async for request in requests:
                match request.WhichOneof("message"):
                    case "heartbeat":
                        self._core.hear(attachment.lease_id, attachment.number)
                    case "detach":
                        self._core.detach(attachment.lease_id, attachment.number)
                        self._fence.forget(attachment.lease_id)
                        _log.info("lease %d was given up by its worker", attachment.lease_id)
                        return
                    case unexpected:
                        _log.warning("lease %d: %s after Register; stream ended", attachment.lease_id, unexpected)
                        return
        except StaleAttachment as error:
            _log.warning("%s: its Detach came too late", error)
        finally:
            announcements.close()

    def _replace_announcements(self, lease_id: int) -> AnnouncementQueue:
        replaced = self._announcements.get(lease_id)
        if replaced is not None:
            replaced.close()
        announcements = self._announcements[lease_id] = AnnouncementQueue(self._max_announcements)
        return announcements

    def _break_stream(self, attachment: Attachment, announcements: AnnouncementQueue) -> None:
        self._core.break_stream(attachment.lease_id, attachment.number)
        self._settled.ring()  # matches of this attachment have nobody to answer
        if self._announcements.get(attachment.lease_id) is announcements:
            del self._announcements[attachment.lease_id]
        _log.info("attachment %d of lease %d ended", attachment.number, attachment.lease_id)

    def _announce(self, announcement: Announcement) -> None:
        announcements = self._announcements.get(announcement.lease_id)
        if announcements is not None:  # else the receiver is told when it attaches again
            message = handed_off_to_pb(announcement.sequence)
            announcements.push(arena_pb2.AttachResponse(sequence_handed_off=message))

    def _attached_to_pb(self, attachment: Attachment) -> arena_pb2.Attached:
        attached = arena_pb2.Attached()
        attached.CopyFrom(self._attached)
        attached.lease_id = attachment.lease_id
        attached.attachment = attachment.number
        attached.handed_off_sequences.extend(handed_off_to_pb(sequence) for sequence in attachment.handed_off)
        return attached


async def _abort(context: _Context, error: ArenaRefusal | NotOwned | ValueError) -> NoReturn:
    await context.abort(_CODES[type(error)], str(error))
    raise AssertionError("grpc.aio's abort() returned")

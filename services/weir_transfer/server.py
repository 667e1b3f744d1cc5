"""The gRPC service over the core: conversion, statuses of refusals, one queue of announcements for each attachment.

Overloaded passes through: the interceptor that every server has gives it its status and its retry hint.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
import grpc.aio
from opentelemetry.trace import Span, Tracer

from weir.core.process import ProcessIdentity
from weir.kv.arena.ownership import NotOwned
from weir.kv.messages import Claims, HandedOff, PageChain, PrefixMatch
from weir.kv.movers.pull import PullFailed
from weir.kv.prefixes import split_hashes
from weir.rpc.conversions import attempt_from_pb, attempt_to_pb
from weir.wire.v1 import arena_pb2, arena_pb2_grpc
from weir_transfer.announcement_queue import AnnouncementQueue
from weir_transfer.arena import ClaimedArena
from weir_transfer.change_signal import ChangeSignal
from weir_transfer.core import ArenaCore
from weir_transfer.exchange.prefix_fetcher import PrefixFetcher, why_not
from weir_transfer.exchange.sequence_fetcher import SequenceFetcher, TooManyStages
from weir_transfer.fence import Fence
from weir_transfer.messages import (
    AdoptionOff,
    Announcement,
    ArenaRefusal,
    ArenaSettings,
    Attachment,
    AttachRefused,
    HandOffRequest,
    LeaseRegistration,
    MatchRequest,
    ReceiverGone,
    ReceiverSilent,
    RecordMismatch,
    StaleAttachment,
)
from weir_transfer.pending_prefixes import WAIT_FROM_PAGES
from weir_transfer.tier_keeper import TierKeeper

_log = logging.getLogger(__name__)
_REGISTER_TIMEOUT_S = 5.0

_CODES: dict[type[Exception], grpc.StatusCode] = {
    AttachRefused: grpc.StatusCode.FAILED_PRECONDITION,
    NotOwned: grpc.StatusCode.FAILED_PRECONDITION,
    RecordMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    AdoptionOff: grpc.StatusCode.FAILED_PRECONDITION,
    StaleAttachment: grpc.StatusCode.ABORTED,
    ReceiverSilent: grpc.StatusCode.UNAVAILABLE,
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
        arena: ClaimedArena,
        settings: ArenaSettings,
        settled: ChangeSignal,
        fence: Fence,
        tracer: Tracer,
    ) -> None:
        """`settled` is notified when a match that had to wait may find more now."""
        self._fetcher: PrefixFetcher | None = None
        self._keepers: Sequence[TierKeeper] = ()
        self._stager: SequenceFetcher | None = None
        self._core = core
        self._settled = settled
        self._prefix_wait_s = settings.prefix_wait_ms / 1000
        self._fence = fence
        self._tracer = tracer
        self._pid_namespace = arena.segment.pid_namespace
        self._max_announcements = arena.segment.geometry.num_slots
        self._announcements: dict[int, AnnouncementQueue] = {}
        self._attached = arena_pb2.Attached(
            segment_path=str(arena.segment.path),
            heartbeat_interval_ms=settings.heartbeat_interval_ms,
            lease_ttl_ms=settings.lease_ttl_ms,
            keeps_prefixes=settings.keeps_prefixes,
            prefix_wait_ms=settings.prefix_wait_ms,
            memory_socket_path="" if arena.memory_server is None else str(arena.memory_server.path),
        )

    def exchange_by(self, fetcher: PrefixFetcher, stager: SequenceFetcher, pages_address: str) -> None:
        """Prefixes and sequences come from other hosts, which get them from here at `pages_address`."""
        self._fetcher, self._stager = fetcher, stager
        self._attached.pages_address = pages_address

    def load_by(self, keepers: Sequence[TierKeeper]) -> None:
        """Prefixes come from their tiers, the nearest first."""
        self._keepers = keepers

    def close(self) -> None:
        """Ends every stream. The leases stay."""
        for announcements in self._announcements.values():
            announcements.close()

    def announce(self, announcements: Sequence[Announcement]) -> None:
        """Sequences that came to their leases by adoption."""
        for announcement in announcements:
            sequence = announcement.sequence
            _log.info("request %s goes on under lease %d", sequence.request_id, announcement.lease_id)
            self._announce(announcement)

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
            chains, match_ids = _chains_from_pb(request), tuple(request.match_ids)
            self._core.release(request.lease_id, request.attachment, chains, tuple(request.slots), match_ids)
        except (ArenaRefusal, NotOwned, ValueError) as error:
            await _abort(context, error)
        return arena_pb2.ReleaseResponse()

    async def Match(  # noqa: N802
        self, request: arena_pb2.MatchRequest, context: _Context
    ) -> arena_pb2.MatchResponse:
        try:
            prompt = _prompt_from_pb(request)
            if request.fetch_from and self._fetcher is not None:
                match = await self._match_fetched(request, prompt)
            else:
                match = await self._match(request, prompt)
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
            self._core.seal(request.lease_id, request.attachment, _chain_from_pb(request.chain))
        except (ArenaRefusal, NotOwned, ValueError) as error:
            await _abort(context, error)
        return arena_pb2.SealResponse()

    async def HandOff(  # noqa: N802
        self, request: arena_pb2.HandOffRequest, context: _Context
    ) -> arena_pb2.HandOffResponse:
        with self._tracer.start_as_current_span("hand_off") as span:
            try:
                committed = self._core.hand_off(request.lease_id, request.attachment, _hand_off_from_pb(request))
            except (ArenaRefusal, NotOwned, ValueError) as error:
                await _abort(context, error)
            receipt = committed.receipt
            span.set_attribute("weir.request_id", request.request_id)
            span.set_attribute("weir.num_pages", receipt.num_pages)
            span.set_attribute("weir.num_bytes_copied", receipt.num_bytes_copied)
        if committed.announcement is not None:
            self._announce(committed.announcement)
        return arena_pb2.HandOffResponse(num_pages=receipt.num_pages, num_bytes_copied=receipt.num_bytes_copied)

    async def Stage(  # noqa: N802
        self, request: arena_pb2.StageRequest, context: _Context
    ) -> AsyncIterator[arena_pb2.StageResponse]:
        if self._stager is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no pages come to this arena from other hosts")
        try:
            async with aclosing(self._stager.stage(request.request_id, request.pages_address)) as staged:
                async for num_pages in staged:
                    yield arena_pb2.StageResponse(num_pages=num_pages)
        except (grpc.aio.AioRpcError, PullFailed, TooManyStages, OSError, ValueError) as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, why_not(error))

    async def _match_fetched(self, request: arena_pb2.MatchRequest, prompt: MatchRequest) -> PrefixMatch:
        """Of a prompt whose prefix another host has more of."""
        with self._tracer.start_as_current_span("fetch_prefix") as span:
            match = await self._match(request, prompt)
            span.set_attribute("weir.prefix_source", request.fetch_from)
            span.set_attribute("weir.num_cached_pages", len(match.page_ids))
        return match

    async def _match(self, request: arena_pb2.MatchRequest, prompt: MatchRequest) -> PrefixMatch:
        """Waits as long as another request is computing the same pages, or they come, holding nothing meanwhile. Raises
        StaleAttachment, before anything is asked for."""
        self._core.check_attached(request.lease_id, request.attachment)
        loop = asyncio.get_running_loop()
        ends_at_s = loop.time() + self._prefix_wait_s
        wait_from_pages = WAIT_FROM_PAGES
        with contextlib.ExitStack() as loading:
            unasked = list(self._keepers)
            spans = self._load(prompt, unasked, loading)
            has_begun = self._try_fetch(request, prompt)  # what is in no tier either
            while True:
                left_s = ends_at_s - loop.time()
                limit = wait_from_pages if left_s > 0 else None
                match = self._core.match(request.lease_id, request.attachment, prompt, wait_from_pages=limit)
                if match is not None:
                    break
                await self._settled.wait(left_s)
                wait_from_pages = 1  # a prefix that is computed in steps: its end is as near as the part before was
                spans += self._load(prompt, unasked, loading)
                has_begun = has_begun or self._try_fetch(request, prompt)
            for span in spans:
                span.set_attribute("weir.num_cached_pages", len(match.page_ids))
        for keeper in self._keepers:
            keeper.note_used(prompt.hashes[: len(match.page_ids)])
        return match

    def _try_fetch(self, request: arena_pb2.MatchRequest, prompt: MatchRequest) -> bool:
        """Whether it begins here to bring some of it from another host."""
        if self._fetcher is None or not request.fetch_from:
            return False
        hashes = prompt.hashes[: prompt.num_matchable]
        return self._fetcher.begin(hashes, request.fetch_from, is_expected=request.fetch_is_expected)

    def _load(self, prompt: MatchRequest, unasked: list[TierKeeper], loading: contextlib.ExitStack) -> list[Span]:
        """Spans of loads that begin here, while `loading` is open. A tier that brings something leaves `unasked`."""
        spans = []
        for keeper in tuple(unasked):
            num_pages = keeper.begin(prompt.hashes[: prompt.num_matchable])
            if num_pages:
                unasked.remove(keeper)
                spans.append(loading.enter_context(self._tracer.start_as_current_span("load_prefix")))
                spans[-1].set_attributes({"weir.tier": keeper.name, "weir.num_pages_in_tier": num_pages})
        return spans

    async def _receive_register(self, requests: _Requests, context: _Context) -> arena_pb2.Register:
        try:
            first = await asyncio.wait_for(anext(requests), _REGISTER_TIMEOUT_S)
        except (TimeoutError, StopAsyncIteration):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"no Register within {_REGISTER_TIMEOUT_S} s")
        if first.WhichOneof("message") != "register":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "message: the first one must be Register")
        return first.register

    def _attach(self, register: arena_pb2.Register) -> Attachment:
        """A process that cannot be killed gets no lease. Raises AttachRefused, Overloaded."""
        if register.pid_namespace != self._pid_namespace:
            raise AttachRefused(
                f"worker {register.worker_id} runs in another pid namespace ({register.pid_namespace}, the transfer "
                f"service in {self._pid_namespace}), so it could not be fenced: let them share one "
                f'(in Compose `pid: "service:…"`, on Kubernetes shareProcessNamespace)'
            )
        registration = _registration_from_pb(register)
        handle = self._fence.try_open(registration.process)
        if handle is None:
            raise AttachRefused(f"{registration.process} of worker {register.worker_id} does not exist")
        try:
            attachment = self._core.attach(registration)
            self._fence.watch(attachment.lease_id, handle)
        except BaseException:
            handle.close()
            raise
        return attachment

    async def _listen(self, requests: _Requests, attachment: Attachment, announcements: AnnouncementQueue) -> None:
        try:
            async for request in requests:
                match request.WhichOneof("message"):
                    case "heartbeat":
                        is_draining = request.heartbeat.is_draining
                        self._core.heartbeat(attachment.lease_id, attachment.number, is_draining=is_draining)
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
        self._settled.notify()  # matches of this attachment have nobody to answer
        if self._announcements.get(attachment.lease_id) is announcements:
            del self._announcements[attachment.lease_id]
        _log.info("attachment %d of lease %d ended", attachment.number, attachment.lease_id)

    def _announce(self, announcement: Announcement) -> None:
        announcements = self._announcements.get(announcement.lease_id)
        if announcements is not None:  # else the answer to its next Attach has it
            message = _handed_off_to_pb(announcement.sequence)
            announcements.push(arena_pb2.AttachResponse(sequence_handed_off=message))

    def _attached_to_pb(self, attachment: Attachment) -> arena_pb2.Attached:
        attached = arena_pb2.Attached()
        attached.CopyFrom(self._attached)
        attached.lease_id = attachment.lease_id
        attached.attachment = attachment.number
        attached.handed_off_sequences.extend(_handed_off_to_pb(sequence) for sequence in attachment.handed_off)
        return attached


async def _abort(context: _Context, error: ArenaRefusal | NotOwned | ValueError) -> NoReturn:
    await context.abort(_CODES[type(error)], str(error))
    raise AssertionError("grpc.aio's abort() returned")


def _registration_from_pb(register: arena_pb2.Register) -> LeaseRegistration:
    return LeaseRegistration(
        worker_id=register.worker_id,
        role=register.role,
        process=ProcessIdentity(register.pid, register.pid_start_ticks),
        page_bytes=register.page_bytes,
        model_digest=register.model_digest,
        lease_id=register.lease_id,
        claims=Claims(
            page_ids=tuple(register.held_page_ids),
            slots=tuple(register.held_slots),
            handing_off_slots=tuple(register.handing_off_slots),
        ),
    )


def _hand_off_from_pb(request: arena_pb2.HandOffRequest) -> HandOffRequest:
    return HandOffRequest(
        slot=request.slot,
        request_id=request.request_id,
        attempt=attempt_from_pb(request.attempt),
        to_worker_id=request.to_worker_id,
        hashes=split_hashes(request.page_hashes),
    )


def _prompt_from_pb(request: arena_pb2.MatchRequest) -> MatchRequest:
    most_pages_ahead = request.most_pages_ahead if request.HasField("most_pages_ahead") else None
    return MatchRequest(split_hashes(request.page_hashes), request.num_pages, request.num_slots, most_pages_ahead)


def _chain_from_pb(chain: arena_pb2.PageChain) -> PageChain:
    earlier_hashes = split_hashes(chain.earlier_page_hashes, "earlier_page_hashes")
    return PageChain(tuple(chain.page_ids), split_hashes(chain.page_hashes), earlier_hashes)


def _chains_from_pb(request: arena_pb2.ReleaseRequest) -> list[PageChain]:
    """Pages that hold nothing of use are a chain without hashes."""
    return [PageChain(tuple(request.page_ids)), *(_chain_from_pb(chain) for chain in request.chains)]


def _handed_off_to_pb(sequence: HandedOff) -> arena_pb2.SequenceHandedOff:
    return arena_pb2.SequenceHandedOff(
        slot=sequence.slot,
        slot_generation=sequence.slot_generation,
        request_id=sequence.request_id,
        attempt=attempt_to_pb(sequence.attempt),
    )

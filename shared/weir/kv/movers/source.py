"""The end of page streams that has the pages: what is offered, and what of it is asked for."""

import hmac
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import xxhash

from weir.core.life import Attempt
from weir.kv.movers.frames import (
    HEADER_BYTES,
    ID_BYTES,
    MAX_PAGES,
    FrameHeader,
    FrameKind,
    MalformedFrame,
    pack_header,
    unpack_header,
    unpack_numbers,
)
from weir.kv.movers.pipes import Buffer, PagePipe

_log = logging.getLogger(__name__)
NO_CHECKSUM = 0
_MAX_SENT_BYTES = 4 << 20
"""In one call to the kernel, where pages are smaller."""
_MAX_STREAMS = 4
"""Of one transfer."""


class TransferGone(Exception):
    """It was withdrawn, or never offered."""


@dataclass(frozen=True, slots=True)
class OfferedPage:
    """A page as it was when it was offered, pinned: whoever pulls it learns this by another way than the stream."""

    page_id: int
    generation: int
    checksum: int


def checksum_of(memory: Buffer) -> int:
    """XXH3-64; the interpreter's lock is free meanwhile."""
    return xxhash.xxh3_64_intdigest(memory)


@dataclass(slots=True)
class _Offer:
    attempt: Attempt
    ticket: bytes
    pages: list[OfferedPage] = field(default_factory=list)
    pipes: dict[PagePipe, None] = field(default_factory=dict)


class PageSource:
    """Offers of one memory. Any thread may call it; `serve` is for a thread a connection."""

    def __init__(self, page: Callable[[int], memoryview], generation_of: Callable[[int], int]) -> None:
        """`page`: bytes of a page by its id. `generation_of`: what it has now."""
        self._page = page
        self._generation_of = generation_of
        self._offers: dict[bytes, _Offer] = {}
        self._lock = threading.Lock()
        self.num_pages_sent = 0
        self.num_pages_gone = 0

    def offer(self, transfer_id: bytes, attempt: Attempt, ticket: bytes) -> None:
        """Whoever shows the ticket may pull what is appended. Both are 16 random bytes."""
        assert len(transfer_id) == len(ticket) == ID_BYTES
        with self._lock:
            self._offers[transfer_id] = _Offer(attempt, ticket)

    def append(
        self, transfer_id: bytes, page_ids: Sequence[int], *, are_checked: Callable[[int], bool] = lambda _: True
    ) -> list[OfferedPage]:
        """Further pages of an offer, which are sealed and pinned until it is withdrawn. Takes their checksums, of those
        that `are_checked` by their index. Raises TransferGone."""
        pages = [
            OfferedPage(
                page_id,
                self._generation_of(page_id),
                checksum_of(self._page(page_id)) if are_checked(index) else NO_CHECKSUM,
            )
            for index, page_id in enumerate(page_ids)
        ]
        with self._lock:
            offer = self._offers.get(transfer_id)
            if offer is None or len(offer.pages) + len(pages) > MAX_PAGES:
                raise TransferGone
            offer.pages += pages
        return pages

    def holds(self, transfer_id: bytes, ticket: bytes) -> bool:
        """Whether the offer is open, so that its pages are pinned, and each is what was offered."""
        with self._lock:
            offer = self._offers.get(transfer_id)
            if offer is None or not hmac.compare_digest(offer.ticket, ticket):
                return False
            pages = tuple(offer.pages)
        return all(self._generation_of(page.page_id) == page.generation for page in pages)

    def withdraw(self, transfer_id: bytes) -> None:
        """Ends its streams. May be called twice."""
        with self._lock:
            offer = self._offers.pop(transfer_id, None)
            pipes = () if offer is None else tuple(offer.pipes)
        for pipe in pipes:
            pipe.end()

    def serve(self, pipe: PagePipe) -> None:
        """Until either end has enough of it. Raises nothing for what the other end does."""
        try:
            hello, ticket = _read_frame(pipe, FrameKind.HELLO)
            offer = self._admit(hello, ticket, pipe)
        except (MalformedFrame, TransferGone, OSError) as error:
            _log.warning("a page stream was not let in: %s", error or "it shows no ticket of an offer")
            return
        try:
            while True:
                self._answer(hello, offer, pipe)
        except (MalformedFrame, OSError) as error:
            _log.debug("a page stream of transfer %s ended: %s", hello.transfer_id.hex(), error)
        finally:
            with self._lock:
                offer.pipes.pop(pipe, None)

    def _admit(self, hello: FrameHeader, ticket: bytes, pipe: PagePipe) -> _Offer:
        with self._lock:
            offer = self._offers.get(hello.transfer_id)
            if offer is None or offer.attempt != hello.attempt or not hmac.compare_digest(offer.ticket, ticket):
                raise TransferGone
            if len(offer.pipes) >= _MAX_STREAMS:
                raise MalformedFrame(f"transfer {hello.transfer_id.hex()} has {_MAX_STREAMS} streams already")
            offer.pipes[pipe] = None
            return offer

    def _answer(self, hello: FrameHeader, offer: _Offer, pipe: PagePipe) -> None:
        """One ASK. Raises MalformedFrame, OSError."""
        asked, raw = _read_frame(pipe, FrameKind.ASK)
        if (asked.transfer_id, asked.attempt) != (hello.transfer_id, hello.attempt):
            raise MalformedFrame("an ASK of another transfer")
        buffers: list[Buffer] = []
        num_bytes = 0
        for number in unpack_numbers(raw).tolist():
            if number >= len(offer.pages):
                raise MalformedFrame(f"page {number}: only {len(offer.pages)} are offered")
            found = offer.pages[number]
            is_there = self._generation_of(found.page_id) == found.generation
            memory = self._page(found.page_id) if is_there else memoryview(b"")
            kind = FrameKind.PAGE if is_there else FrameKind.GONE
            self.num_pages_sent += is_there
            self.num_pages_gone += not is_there
            buffers += (
                pack_header(
                    FrameHeader(
                        kind, hello.transfer_id, hello.attempt, number, found.generation, len(memory), found.checksum
                    )
                ),
                memory,
            )
            num_bytes += len(memory)
            if num_bytes >= _MAX_SENT_BYTES:
                pipe.send(buffers)
                buffers, num_bytes = [], 0
        if buffers:
            pipe.send(buffers)


def _read_frame(pipe: PagePipe, kind: FrameKind) -> tuple[FrameHeader, bytes]:
    """Raises MalformedFrame for one of another kind, OSError."""
    raw = bytearray(HEADER_BYTES)
    pipe.receive(memoryview(raw))
    header = unpack_header(raw)
    if header.kind != kind:
        raise MalformedFrame(f"{header.kind.name} where {kind.name} was expected")
    body = bytearray(header.num_bytes)
    pipe.receive(memoryview(body))
    return header, bytes(body)

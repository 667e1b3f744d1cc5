"""Pages over page streams, in threads that each have one:

    want ──> asked of a stream ──> bytes in place ──> checksum as offered ──> here
               ^    │ the stream broke │                     │ another one
               └────┴──────────────────┴─────────────────────┘ a second time: the pull fails

A page is asked for when there is room in the window, by whichever stream comes first. What a broken stream has not
brought whole is asked for anew: pinned pages do not change.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from weir.core.life import Attempt
from weir.kv.movers.frames import (
    HEADER_BYTES,
    MAX_ASKED,
    FrameHeader,
    FrameKind,
    MalformedFrame,
    pack_header,
    pack_numbers,
    unpack_header,
)
from weir.kv.movers.pipes import PagePipe
from weir.kv.movers.pull import PulledPages, PullFigures, WantedPage
from weir.kv.movers.source import checksum_of

_MAX_TRIES = 2
"""For the bytes of a page to be those that were offered."""
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0
_END_S = 1.0


@dataclass(frozen=True, slots=True)
class PullLimits:
    """`window_bytes`: asked for and not here yet, of one stream. `max_breaks`: streams that may break before the pull
    fails, all together. `rest_s`: a stream of which nothing is asked for so long is closed, before its source does."""

    num_streams: int = 2
    window_bytes: int = 64 << 20
    max_breaks: int = 3
    rest_s: float = 2.0

    def window_pages(self, page_bytes: int) -> int:
        return max(1, min(MAX_ASKED, self.window_bytes // page_bytes))


@dataclass(frozen=True, slots=True)
class PullHello:
    """What the source lets a stream in by."""

    transfer_id: bytes
    attempt: Attempt
    ticket: bytes

    def frame(self) -> bytes:
        header = FrameHeader(FrameKind.HELLO, self.transfer_id, self.attempt, num_bytes=len(self.ticket))
        return pack_header(header) + self.ticket

    def ask(self, numbers: Sequence[int]) -> bytes:
        raw = pack_numbers(numbers)
        return pack_header(FrameHeader(FrameKind.ASK, self.transfer_id, self.attempt, num_bytes=len(raw))) + raw


class PagePull:
    """`Pull` over page streams, in threads of its own."""

    def __init__(
        self,
        hello: PullHello,
        page_bytes: int,
        connect: Callable[[float], PagePipe],
        limits: PullLimits,
        deadline_s: float,
    ) -> None:
        """`connect`: a new stream to the source, within so many seconds; raises OSError. `deadline_s`: of
        `time.monotonic`, for all of it."""
        self._hello = hello
        self._page_bytes = page_bytes
        self._connect = connect
        self._limits = limits
        self._window = limits.window_pages(page_bytes)
        self._pulled = PulledPages(page_bytes, deadline_s)
        self._changed = self._pulled.changed
        self._pipes: dict[PagePipe, None] = {}
        """Ended in the order in which they came, so that what a pull does depends on no address."""
        self._threads: list[threading.Thread] = []

    @property
    def figures(self) -> PullFigures:
        return self._pulled.figures

    @property
    def num_first_pages(self) -> int:
        return self._pulled.num_first_pages

    def want(self, pages: Sequence[WantedPage]) -> None:
        self._pulled.want(pages)
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._run, name="page pull", daemon=True)
                for _ in range(self._limits.num_streams)
            ]
            for thread in self._threads:
                thread.start()

    def wait(self) -> None:
        self._pulled.wait()

    def finish(self) -> PullFigures:
        return self._pulled.finish(self.cancel)

    def cancel(self) -> bool:
        """Ends the streams. False: a thread still has one of them."""
        with self._changed:
            self._pulled.fail("cancelled")
            pipes = tuple(self._pipes)
        for pipe in pipes:
            pipe.end()
        with self._changed:  # a thread that still connects writes nothing: it looks for a problem before it pulls
            return self._changed.wait_for(lambda: not self._pipes, _END_S)

    def _run(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while self._is_wanted():
            stream = _Stream(self._hello, self._page_bytes)
            try:
                self._pull_over(stream)
            except (OSError, MalformedFrame) as error:
                self._on_break(stream, str(error) or type(error).__name__)
                with self._changed:
                    self._changed.wait_for(lambda: self._pulled.problem is not None, backoff_s)
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
            finally:
                with self._changed:
                    if stream.pipe is not None:
                        self._pipes.pop(stream.pipe, None)
                    self._changed.notify_all()
                stream.close()

    def _is_wanted(self) -> bool:
        with self._changed:
            return self._pulled.wait_wanted()

    def _pull_over(self, stream: "_Stream") -> None:
        """Until nothing is missing, or wanted for a while. Raises OSError, MalformedFrame."""
        pipe = stream.pipe = self._connect(self._pulled.left_s)
        with self._changed:
            if self._pulled.problem is not None:
                return
            self._pipes[pipe] = None
        stream.greet()
        while self._pulled.problem is None:
            with self._changed:
                if not stream.asked:
                    self._changed.wait_for(lambda: self._pulled.is_something_to_do, self._limits.rest_s)
                pages = self._take(stream)
            if pages:
                stream.ask(pages)
            if not stream.asked:
                return
            self._take_in(stream.receive())

    def _take(self, stream: "_Stream") -> list[WantedPage]:
        """What to ask for next; nothing while more than half of the window is on its way."""
        room = self._window - len(stream.asked)
        if self._pulled.problem is not None or (stream.asked and room < self._window / 2):
            return []
        return [self._pulled.queue.popleft() for _ in range(min(room, len(self._pulled.queue)))]

    def _take_in(self, received: "_Received") -> None:
        page = received.page
        with self._changed:
            if self._pulled.problem is not None:
                return
            if received.is_gone:
                self._pulled.fail(f"page {page.number} of the offer is not there any more")
            elif received.is_as_offered:
                self._pulled.add([page.number])
            else:
                self.figures.num_wrong += 1
                self._pulled.queue.append(replace(page, num_tries=page.num_tries + 1))
                if page.num_tries + 1 >= _MAX_TRIES:
                    why = f"page {page.number} of the offer came {_MAX_TRIES} times with another checksum"
                    self._pulled.fail(why)

    def _on_break(self, stream: "_Stream", why: str) -> None:
        with self._changed:
            self._pulled.queue.extendleft(reversed(stream.asked))
            stream.asked.clear()
            self.figures.num_breaks += 1
            if self.figures.num_breaks > self._limits.max_breaks:
                self._pulled.fail(f"its stream broke {self.figures.num_breaks} times, the last time since {why}")
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class _Received:
    page: WantedPage
    is_as_offered: bool = False
    is_gone: bool = False


class _Stream:
    """One connection: pages come in the order in which they were asked for."""

    def __init__(self, hello: PullHello, page_bytes: int) -> None:
        self._hello = hello
        self._page_bytes = page_bytes
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._has_header = False
        """The next frame's came with the last page."""
        self.asked: deque[WantedPage] = deque()
        self.pipe: PagePipe | None = None

    def greet(self) -> None:
        assert self.pipe is not None
        self.pipe.send([self._hello.frame()])

    def ask(self, pages: Sequence[WantedPage]) -> None:
        assert self.pipe is not None
        self.asked.extend(pages)
        self.pipe.send([self._hello.ask([page.number for page in pages])])

    def receive(self) -> _Received:
        """The next of those that were asked for. Raises OSError, MalformedFrame."""
        assert self.pipe is not None
        if not self._has_header:
            self.pipe.receive(self._header)
        self._has_header = False
        page, header = self.asked[0], unpack_header(self._header)
        named = (header.transfer_id, header.attempt, header.number)
        if named != (self._hello.transfer_id, self._hello.attempt, page.number):
            raise MalformedFrame(f"{header.kind.name} of page {header.number}, where page {page.number} is due")
        if header.kind == FrameKind.GONE:
            self.asked.popleft()
            return _Received(page, is_gone=True)
        if header.kind != FrameKind.PAGE or header.num_bytes != self._page_bytes:
            raise MalformedFrame(f"{header.kind.name} of {header.num_bytes} bytes: pages have {self._page_bytes}")
        memory = page.place.begin()
        if len(self.asked) > 1:
            self.pipe.receive(memory, self._header)
            self._has_header = True
        else:
            self.pipe.receive(memory)
        is_same = (header.generation, header.checksum) == (page.generation, page.checksum)
        is_as_offered = is_same and checksum_of(memory) == page.checksum
        if is_as_offered:
            page.place.end(memory)
        self.asked.popleft()  # until here a break has it asked for anew
        return _Received(page, is_as_offered=is_as_offered)

    def close(self) -> None:
        if self.pipe is not None:
            with suppress(OSError):
                self.pipe.close()

"""The end of page streams that wants pages: it reserved them, and is the only one that writes into them.

    want ──> asked of a stream ──> bytes in place ──> checksum as offered ──> here
               ^    │ the stream broke │                     │ another one
               └────┴──────────────────┴─────────────────────┘ a second time: the pull fails

A page is asked for when there is room in the window, by whichever stream comes first. What a broken stream has not
brought whole is asked for anew: pinned pages do not change.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from weir.core.life import Attempt
from weir.kv.memory.page_access import PagePlace
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
from weir.kv.movers.source import checksum_of

_MAX_TRIES = 2
"""For the bytes of a page to be those that were offered."""
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0
_END_S = 1.0


class PullFailed(Exception):
    """Some pages did not come; says why. Those that did are to be used as far as `num_first_pages` says."""


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
class WantedPage:
    """A page of the offer by its number, what was said of it, and where it is to be. `checksum` 0: none was taken."""

    number: int
    generation: int
    checksum: int
    place: PagePlace
    num_tries: int = 0
    page_id: int = 0
    """Where it is in the source's memory, for who maps that."""


@dataclass(slots=True)
class PullFigures:
    """`num_bytes`: of pages that came and were as offered. `busy_s`: while some were asked for and not here.
    `num_direct`: pages that were read from the source's memory."""

    num_pages: int = 0
    num_bytes: int = 0
    num_wrong: int = 0
    num_breaks: int = 0
    busy_s: float = 0.0
    num_direct: int = 0


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


class Pull(Protocol):
    """Of one transfer. `want` and `finish` may be called by any thread, `finish` once."""

    @property
    def figures(self) -> PullFigures: ...

    @property
    def num_first_pages(self) -> int:
        """Of the offer, from its first page on without a gap: those that are here, also of a pull that failed."""
        ...

    def want(self, pages: Sequence[WantedPage]) -> None:
        """Asks for them as soon as there is room, and never blocks."""
        ...

    def wait(self) -> None:
        """Until all that was wanted so far is here. Raises PullFailed; `cancel` says whether anybody still writes."""
        ...

    def finish(self) -> PullFigures:
        """Waits until all that was wanted is here. Raises PullFailed; nobody writes into the pages any more then,
        unless `cancel` says otherwise."""
        ...

    def cancel(self) -> bool:
        """Ends it. False: somebody still writes, and the pages must be given to nobody yet. May be called again."""
        ...


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
        self._deadline_s = deadline_s
        self._window = limits.window_pages(page_bytes)
        self._queue: deque[WantedPage] = deque()
        self._num_missing = 0
        self._here: set[int] = set()
        """Numbers of pages that came and were as offered: nobody writes into them any more."""
        self._busy_since_s = 0.0
        self._is_complete = False
        """Nothing more will be wanted."""
        self._problem: str | None = None
        self._changed = threading.Condition()
        self._pipes: set[PagePipe] = set()
        self._threads: list[threading.Thread] = []
        self.figures = PullFigures()

    @property
    def num_first_pages(self) -> int:
        """Of the offer, from its first page on without a gap: those that are here, also of a pull that failed."""
        with self._changed:
            return next(number for number in range(len(self._here) + 1) if number not in self._here)

    def want(self, pages: Sequence[WantedPage]) -> None:
        """Asks for them as soon as there is room, and never blocks."""
        with self._changed:
            if not self._num_missing:
                self._busy_since_s = time.monotonic()
            self._queue.extend(pages)
            self._num_missing += len(pages)
            self._changed.notify_all()
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._run, name="page pull", daemon=True)
                for _ in range(self._limits.num_streams)
            ]
            for thread in self._threads:
                thread.start()

    def wait(self) -> None:
        """Until all that was wanted so far is here. Raises PullFailed; `cancel` says whether anybody still writes."""
        with self._changed:
            problem = self._wait_here()
        if problem is not None:
            raise PullFailed(problem)

    def finish(self) -> PullFigures:
        """Waits until all that was wanted is here. Raises PullFailed; nobody writes into the pages any more then,
        unless `cancel` says otherwise."""
        with self._changed:
            self._is_complete = True
            self._changed.notify_all()
            problem = self._wait_here()
        is_over = self.cancel()
        if problem is not None:
            raise PullFailed(problem if is_over else f"{problem}; a thread still writes into its pages")
        return self.figures

    def cancel(self) -> bool:
        """Ends the streams. False: a thread still has one of them, and the pages must be given to nobody yet. May be
        called again."""
        with self._changed:
            self._problem = self._problem or "cancelled"
            self._changed.notify_all()
            pipes = tuple(self._pipes)
        for pipe in pipes:
            pipe.end()
        with self._changed:  # a thread that still connects writes nothing: it looks for a problem before it pulls
            return self._changed.wait_for(lambda: not self._pipes, _END_S)

    def _wait_here(self) -> str | None:
        """What is wrong, once nothing is missing or something is."""
        while self._num_missing and self._problem is None:
            if not self._changed.wait(max(0.0, self._deadline_s - time.monotonic())):
                self._problem = "its time was over"
        return self._problem

    def _run(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while self._wait_wanted():
            stream = _Stream(self._hello, self._page_bytes)
            try:
                self._pull_over(stream)
            except (OSError, MalformedFrame) as error:
                self._on_break(stream, str(error) or type(error).__name__)
                with self._changed:
                    self._changed.wait_for(lambda: self._problem is not None, backoff_s)
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
            finally:
                with self._changed:
                    self._pipes.discard(stream.pipe)
                    self._changed.notify_all()
                stream.close()

    def _wait_wanted(self) -> bool:
        """Whether there is something to ask for; False: the pull is over."""
        with self._changed:
            if not self._changed.wait_for(self._is_something_to_do, max(0.0, self._deadline_s - time.monotonic())):
                self._problem = self._problem or "its time was over"
                self._changed.notify_all()
            return self._problem is None and bool(self._queue)

    def _is_something_to_do(self) -> bool:
        """Pages to ask for, or to end."""
        return self._problem is not None or bool(self._queue) or (self._is_complete and not self._num_missing)

    def _pull_over(self, stream: "_Stream") -> None:
        """Until nothing is missing, or wanted for a while. Raises OSError, MalformedFrame."""
        pipe = stream.pipe = self._connect(max(0.0, self._deadline_s - time.monotonic()))
        with self._changed:
            if self._problem is not None:
                return
            self._pipes.add(pipe)
        stream.greet()
        while self._problem is None:
            with self._changed:
                if not stream.asked:
                    self._changed.wait_for(self._is_something_to_do, self._limits.rest_s)
                pages = self._take(stream)
            if pages:
                stream.ask(pages)
            if not stream.asked:
                return
            self._take_in(stream.receive())

    def _take(self, stream: "_Stream") -> list[WantedPage]:
        """What to ask for next; nothing while more than half of the window is on its way."""
        room = self._window - len(stream.asked)
        if self._problem is not None or (stream.asked and room < self._window / 2):
            return []
        return [self._queue.popleft() for _ in range(min(room, len(self._queue)))]

    def _take_in(self, received: "_Received") -> None:
        page = received.page
        with self._changed:
            if self._problem is not None:
                return
            if received.is_gone:
                self._problem = f"page {page.number} of the offer is not there any more"
            elif received.is_as_offered:
                self._here.add(page.number)
                self._num_missing -= 1
                self.figures.num_pages += 1
                self.figures.num_bytes += self._page_bytes
                if not self._num_missing:
                    self.figures.busy_s += time.monotonic() - self._busy_since_s
            else:
                self.figures.num_wrong += 1
                self._queue.append(replace(page, num_tries=page.num_tries + 1))
                if page.num_tries + 1 >= _MAX_TRIES:
                    self._problem = f"page {page.number} of the offer came {_MAX_TRIES} times with another checksum"
            if self._problem is not None or not self._num_missing:
                self._changed.notify_all()

    def _on_break(self, stream: "_Stream", why: str) -> None:
        with self._changed:
            self._queue.extendleft(reversed(stream.asked))
            stream.asked.clear()
            self.figures.num_breaks += 1
            if self._problem is None and self.figures.num_breaks > self._limits.max_breaks:
                self._problem = f"its stream broke {self.figures.num_breaks} times, the last time since {why}"
            if self._problem is None and time.monotonic() > self._deadline_s:
                self._problem = "its time was over"
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

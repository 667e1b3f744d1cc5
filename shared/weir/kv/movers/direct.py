"""Pages that their receiver reads from the source's memory by itself: mapped here, or by an engine of one-sided reads.

    want ──> read, some at a time ──> the source confirms that they were pinned all along ──> here

The source has no part in the reads, and can end, or give pages to somebody else, amid them. So what was read counts
once it has said that its offer is still open; until then it is nobody's. Where an offer has checksums, as that of its
first page always, they are compared too: whether this is the memory that it is taken for.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from weir.kv.memory.device import DeviceMemory
from weir.kv.movers.pull import PullFailed, PullFigures, WantedPage
from weir.kv.movers.source import NO_CHECKSUM, checksum_of

_END_S = 1.0


class PageReader(Protocol):
    """Of one source's memory, for one pull."""

    @property
    def num_at_a_time(self) -> int:
        """Pages of one `read`, at most."""
        ...

    def read(self, pages: Sequence[WantedPage]) -> None:
        """Into their places. Raises OSError, ValueError. Nobody writes into them any more then, or when it returns."""
        ...

    def close(self) -> None: ...


class MappedMemory:
    """`PageReader` of memory of a device of this machine."""

    num_at_a_time = 1

    def __init__(self, memory: DeviceMemory, page_bytes: int) -> None:
        """`memory` is closed with it."""
        self._memory = memory
        self._page_bytes = page_bytes

    def read(self, pages: Sequence[WantedPage]) -> None:
        for page in pages:
            page.place.copy_from(self._memory, page.page_id * self._page_bytes)

    def close(self) -> None:
        self._memory.close()


class DirectPull:
    """`Pull` of one transfer, in a thread of its own."""

    def __init__(
        self, reader: PageReader, page_bytes: int, confirm: Callable[[float], bool], deadline_s: float
    ) -> None:
        """`reader` is closed at the end. `confirm`: whether what was offered is as it was, within so many seconds;
        raises OSError. `deadline_s`: of `time.monotonic`, for all of it."""
        self._reader = reader
        self._page_bytes = page_bytes
        self._confirm = confirm
        self._deadline_s = deadline_s
        self._queue: deque[WantedPage] = deque()
        self._num_missing = 0
        self._here: set[int] = set()
        self._is_complete = False
        self._is_writing = False
        self._problem: str | None = None
        self._changed = threading.Condition()
        self.figures = PullFigures()
        self._thread = threading.Thread(target=self._run, name="direct pull", daemon=True)
        self._thread.start()

    @property
    def num_first_pages(self) -> int:
        with self._changed:
            return next(number for number in range(len(self._here) + 1) if number not in self._here)

    def want(self, pages: Sequence[WantedPage]) -> None:
        with self._changed:
            self._queue.extend(pages)
            self._num_missing += len(pages)
            self._changed.notify_all()

    def wait(self) -> None:
        with self._changed:
            problem = self._wait_here()
        if problem is not None:
            raise PullFailed(problem)

    def finish(self) -> PullFigures:
        with self._changed:
            self._is_complete = True
            self._changed.notify_all()
            problem = self._wait_here()
        is_over = self.cancel()
        if problem is not None:
            raise PullFailed(problem if is_over else f"{problem}; a page is still being copied")
        return self.figures

    def cancel(self) -> bool:
        with self._changed:
            self._problem = self._problem or "cancelled"
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._is_writing, _END_S)

    def _wait_here(self) -> str | None:
        """What is wrong, once nothing is missing or something is."""
        while self._num_missing and self._problem is None:
            if not self._changed.wait(max(0.0, self._deadline_s - time.monotonic())):
                self._problem = "its time was over"
        return self._problem

    def _run(self) -> None:
        try:
            while pages := self._take_all():
                self._bring(pages)
        except Exception as error:  # noqa: BLE001 -- whatever a device raises: nobody waits for a thread that has ended
            self._fail(str(error) or type(error).__name__)
        finally:
            self._reader.close()

    def _take_all(self) -> list[WantedPage]:
        """What is wanted now; nothing: the pull is over."""
        with self._changed:
            left_s = max(0.0, self._deadline_s - time.monotonic())
            if not self._changed.wait_for(self._is_something_to_do, left_s):
                self._problem = self._problem or "its time was over"
                self._changed.notify_all()
            pages = [] if self._problem is not None else list(self._queue)
            self._queue.clear()
            return pages

    def _is_something_to_do(self) -> bool:
        return self._problem is not None or bool(self._queue) or (self._is_complete and not self._num_missing)

    def _bring(self, pages: Sequence[WantedPage]) -> None:
        """Raises OSError, ValueError."""
        began_s = time.monotonic()
        for first in range(0, len(pages), self._reader.num_at_a_time):
            if not self._try_begin():
                return
            try:
                self._read(pages[first : first + self._reader.num_at_a_time])
            finally:
                self._end()
        if self._has_failed():
            return
        if not self._confirm(max(0.0, self._deadline_s - time.monotonic())):
            raise ValueError("the offer has ended, or a page is not what was offered")
        with self._changed:
            if self._problem is not None:
                return
            self._here.update(page.number for page in pages)
            self._num_missing -= len(pages)
            self.figures.num_pages += len(pages)
            self.figures.num_direct += len(pages)
            self.figures.num_bytes += len(pages) * self._page_bytes
            self.figures.busy_s += time.monotonic() - began_s
            self._changed.notify_all()

    def _has_failed(self) -> bool:
        with self._changed:
            return self._problem is not None

    def _read(self, pages: Sequence[WantedPage]) -> None:
        self._reader.read(pages)
        for page in pages:
            if page.checksum != NO_CHECKSUM and checksum_of(page.place.read()) != page.checksum:
                self.figures.num_wrong += 1
                raise ValueError(f"page {page.number} of the offer has another checksum in the memory that was read")

    def _try_begin(self) -> bool:
        """False: nothing is to be written any more, or it is too late."""
        with self._changed:
            if self._problem is None and time.monotonic() > self._deadline_s:
                self._problem = "its time was over"
                self._changed.notify_all()
            self._is_writing = self._problem is None
            return self._is_writing

    def _end(self) -> None:
        with self._changed:
            self._is_writing = False
            self._changed.notify_all()

    def _fail(self, why: str) -> None:
        with self._changed:
            self.figures.num_breaks += 1
            self._problem = self._problem or why
            self._changed.notify_all()

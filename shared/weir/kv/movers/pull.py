"""The end of a transfer that wants pages: what it wants, what came, and how it ends.

    want ──> on its way ──> here, as offered          all that was wanted is here: the pull is complete
                   └──────> a problem: the pull fails, and what is here already is of use as far as it has no gap

Its pages were reserved, and nobody else writes into them: over page streams (`stream_pull`) or from the source's
memory (`direct`).
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from weir.kv.memory.page_access import PagePlace

_TOO_LATE = "its time was over"


class PullFailed(Exception):
    """Some pages did not come; says why. Those that did are to be used as far as `num_first_pages` says."""


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


class PulledPages:
    """What of a pull is wanted and what is here. `changed` guards it, and is notified of all that may be waited for;
    methods that say so are called with it held."""

    def __init__(self, page_bytes: int, deadline_s: float) -> None:
        """`deadline_s`: of `time.monotonic`, for all of the pull."""
        self.changed = threading.Condition()
        self.figures = PullFigures()
        self.problem: str | None = None
        self.queue: deque[WantedPage] = deque()
        """Wanted, and on its way by nobody yet."""
        self._page_bytes = page_bytes
        self._deadline_s = deadline_s
        self._num_missing = 0
        self._here: set[int] = set()
        """Numbers of pages that came and were as offered: nobody writes into them any more."""
        self._is_complete = False
        """Nothing more will be wanted."""
        self._busy_since_s = 0.0

    @property
    def num_first_pages(self) -> int:
        """Of the offer, from its first page on without a gap: those that are here."""
        with self.changed:
            return next(number for number in range(len(self._here) + 1) if number not in self._here)

    @property
    def left_s(self) -> float:
        return max(0.0, self._deadline_s - time.monotonic())

    @property
    def is_something_to_do(self) -> bool:
        """Pages to bring, or to end. With `changed` held."""
        is_all_here = self._is_complete and not self._num_missing
        return self.problem is not None or bool(self.queue) or is_all_here

    def want(self, pages: Sequence[WantedPage]) -> None:
        with self.changed:
            if not self._num_missing:
                self._busy_since_s = time.monotonic()
            self.queue.extend(pages)
            self._num_missing += len(pages)
            self.changed.notify_all()

    def wait_wanted(self) -> bool:
        """Whether there are pages to bring; False: the pull is over. With `changed` held."""
        if not self.changed.wait_for(lambda: self.is_something_to_do, self.left_s):
            self.fail(_TOO_LATE)
        return self.problem is None and bool(self.queue)

    def add(self, numbers: Sequence[int]) -> None:
        """These came and are as offered. With `changed` held."""
        self._here.update(numbers)
        self._num_missing -= len(numbers)
        self.figures.num_pages += len(numbers)
        self.figures.num_bytes += len(numbers) * self._page_bytes
        if not self._num_missing:
            self.figures.busy_s += time.monotonic() - self._busy_since_s
            self.changed.notify_all()

    def fail(self, why: str) -> None:
        """The first problem is the one that is told. With `changed` held."""
        self.problem = self.problem or why
        self.changed.notify_all()

    def wait(self) -> None:
        """Until all that was wanted so far is here. Raises PullFailed."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.problem is not None or not self._num_missing, self.left_s):
                self.fail(_TOO_LATE)
            if self.problem is not None:
                raise PullFailed(self.problem)

    def finish(self, cancel: Callable[[], bool]) -> PullFigures:
        """As `Pull.finish`. `cancel`: the pull's."""
        with self.changed:
            self._is_complete = True
            self.changed.notify_all()
        try:
            self.wait()
        except PullFailed as error:
            raise error if cancel() else PullFailed(f"{error}; a thread still writes into its pages") from None
        cancel()
        return self.figures

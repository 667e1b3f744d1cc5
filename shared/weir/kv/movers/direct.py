"""Pages that their receiver copies from the source's memory, a device's of this machine, which is mapped here.

    want ──> copied ──> the source confirms that they were pinned all along ──> here

The source has no part in the copies, and can end, or give pages to somebody else, amid them. So what was copied counts
once it has said that its offer is still open; until then it is nobody's. Where an offer has checksums, as that of its
first page always, they are compared too: whether this is the memory that it is taken for.
"""

import threading
from collections.abc import Callable, Sequence

from weir.kv.memory.device import DeviceMemory
from weir.kv.movers.pull import PulledPages, PullFigures, WantedPage
from weir.kv.movers.source import NO_CHECKSUM, checksum_of

_END_S = 1.0


class DirectPull:
    """`Pull` of one transfer, in a thread of its own."""

    def __init__(
        self, memory: DeviceMemory, page_bytes: int, confirm: Callable[[float], bool], deadline_s: float
    ) -> None:
        """`memory`: the source's, closed at the end. `confirm`: whether what was offered is as it was, within so many
        seconds; raises OSError. `deadline_s`: of `time.monotonic`, for all of it."""
        self._memory = memory
        self._page_bytes = page_bytes
        self._confirm = confirm
        self._pulled = PulledPages(page_bytes, deadline_s)
        self._changed = self._pulled.changed
        self._is_writing = False
        self._thread = threading.Thread(target=self._run, name="direct pull", daemon=True)
        self._thread.start()

    @property
    def figures(self) -> PullFigures:
        return self._pulled.figures

    @property
    def num_first_pages(self) -> int:
        return self._pulled.num_first_pages

    def want(self, pages: Sequence[WantedPage]) -> None:
        self._pulled.want(pages)

    def wait(self) -> None:
        self._pulled.wait()

    def finish(self) -> PullFigures:
        return self._pulled.finish(self.cancel)

    def cancel(self) -> bool:
        with self._changed:
            self._pulled.fail("cancelled")
            return self._changed.wait_for(lambda: not self._is_writing, _END_S)

    def _run(self) -> None:
        try:
            while pages := self._take_all():
                self._bring(pages)
        except Exception as error:  # noqa: BLE001 -- whatever a device raises: nobody waits for a thread that has ended
            with self._changed:
                self.figures.num_breaks += 1
                self._pulled.fail(str(error) or type(error).__name__)
        finally:
            self._memory.close()

    def _take_all(self) -> list[WantedPage]:
        """What is wanted now; nothing: the pull is over."""
        with self._changed:
            pages = list(self._pulled.queue) if self._pulled.wait_wanted() else []
            self._pulled.queue.clear()
            return pages

    def _bring(self, pages: Sequence[WantedPage]) -> None:
        """Raises OSError, ValueError."""
        for page in pages:
            if not self._try_begin():
                return
            try:
                self._copy(page)
            finally:
                self._end()
        with self._changed:
            if self._pulled.problem is not None:
                return
        if not self._confirm(self._pulled.left_s):
            raise ValueError("the offer has ended, or a page is not what was offered")
        with self._changed:
            if self._pulled.problem is None:
                self.figures.num_direct += len(pages)
                self._pulled.add([page.number for page in pages])

    def _copy(self, page: WantedPage) -> None:
        page.place.copy_from(self._memory, page.page_id * self._page_bytes)
        if page.checksum != NO_CHECKSUM and checksum_of(page.place.read()) != page.checksum:
            self.figures.num_wrong += 1
            raise ValueError(f"page {page.number} of the offer has another checksum in the memory that was read")

    def _try_begin(self) -> bool:
        """False: nothing is to be written any more."""
        with self._changed:
            self._is_writing = self._pulled.problem is None
            return self._is_writing

    def _end(self) -> None:
        with self._changed:
            self._is_writing = False
            self._changed.notify_all()

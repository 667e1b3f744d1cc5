"""The local batcher: computes prompts in chunks beside the decodes of the same batch, and decodes them itself.

With it one worker serves alone. It takes over handed-off sequences too, so a worker can do both at a time.
"""

from weir.engine.batching.batcher import BatchLimits
from weir.engine.batching.running import RunningBatcher, RunningSettings
from weir.engine.memory.page_claims import PageClaimer, Unrecordable
from weir.engine.memory.page_room import in_batch, num_growing_pages
from weir.engine.memory.pages import PagePool
from weir.engine.messages import Arrival, Failure, FailureReason
from weir.engine.sequence import OpenLog, Sequence


class LocalBatcher(RunningBatcher):
    """A prompt joins the batch when there is a slot and pages for all of it, and grows page by page from there on."""

    def __init__(
        self, limits: BatchLimits, pool: PagePool, open_log: OpenLog, settings: RunningSettings | None = None
    ) -> None:
        super().__init__(limits, pool, settings or RunningSettings())
        self._placer = PageClaimer(pool, open_log)

    def add(self, arrival: Arrival) -> None:
        if arrival.slot is not None:
            self._add_handed_off(arrival)
        else:
            self._add_prompt(arrival)

    def _try_admit(self, sequence: Sequence) -> bool:
        """Not with the pages that the batch will want at once: what joins must not drive others out."""
        if sequence.slot is not None:
            return True
        num_pages = sequence.num_pages_short_of(0)
        if num_pages + num_growing_pages(in_batch(self._ranked())) > self.pool.num_free_pages:
            return False
        try:
            return self._placer.try_place(sequence)
        except Unrecordable as error:
            self._end(sequence, failure=Failure(FailureReason.INTERNAL, str(error)))
            return True

    def _need_of_waiting(self) -> list[tuple[int, int]]:
        wanted = [(s.num_pages_short_of(0), int(s.slot is None)) for s in self._joinable()]
        return [need for need in wanted if any(need)]

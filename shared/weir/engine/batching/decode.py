"""The decode batcher: takes in handed-off sequences and draws their tokens until they end."""

from weir.engine.batching.batcher import BatchLimits
from weir.engine.batching.running import RunningBatcher, RunningSettings
from weir.engine.memory.pages import PagePool
from weir.engine.messages import Arrival
from weir.engine.sequence import Sequence


class DecodeBatcher(RunningBatcher):
    """What comes has its prompt computed and its pages with it, so a place in the batch is all that it waits for."""

    def __init__(self, limits: BatchLimits, pool: PagePool, settings: RunningSettings | None = None) -> None:
        super().__init__(limits, pool, settings or RunningSettings())

    def add(self, arrival: Arrival) -> None:
        self._add_handed_off(arrival)

    def _try_admit(self, sequence: Sequence) -> bool:
        del sequence
        return True

    def _need_of_waiting(self) -> list[tuple[int, int]]:
        """It has its prompt's pages; the first token may want one more."""
        wanted = [sequence.num_pages_short_of(0) for sequence in self._joinable()]
        return [(num_pages, 0) for num_pages in wanted if num_pages]

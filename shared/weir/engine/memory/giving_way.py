"""Prompts take the pages of a chunk when it is planned, so several may be half read when pages run short.

Who has waited for pages for a while takes those of prompts behind it: from the lowest lane the latest first, as many as
it takes. With none behind it, it gives way itself in the end, since workers that share an arena do not know of each
other's prompts. A prompt gives way once; from then on it waits for all the pages that it lacks, and holds none of its
own meanwhile. So of those that may wait for each other one at least goes on or holds nothing, and all end.

What was in the pages is computed again, but for the cached prefix that the prompt came with.
"""

from collections.abc import Iterable

from weir.engine.counters import EngineCounters
from weir.engine.memory.pages import PagePool
from weir.engine.sequence import Sequence, Stage

AFTER_S = 0.1
"""So long a prompt waits for pages before others give way: the arena may have some meanwhile."""
ALONE_AFTER_S = 1.0
"""Before it gives way itself: sequences that decode end, or give way after `AFTER_S`."""


class GivingWay:
    """Of the prompts of a prefill worker. `ranked` is always all of them in order."""

    def __init__(self, pool: PagePool, counters: EngineCounters) -> None:
        self._pool = pool
        self._counters = counters
        self._next_at_s = 0.0
        """What was given up comes by way of the arena: until then nobody else gives way."""

    def make_way(self, ranked: list[Sequence], chunk_tokens: int, now_s: float) -> None:
        """For the first that has waited long enough for the pages of its next `chunk_tokens`. No step runs."""
        due = self._try_find(ranked, chunk_tokens)
        if due is None:
            return
        at_s, victims = due
        if now_s < at_s:
            return
        self._next_at_s = now_s + AFTER_S
        for sequence in victims:
            self._give_way(sequence, now_s)

    def next_deadline_s(self, ranked: list[Sequence], chunk_tokens: int, decided_at_s: float) -> float | None:
        """When `make_way` has something to do."""
        due = self._try_find(ranked, chunk_tokens)
        return due[0] if due is not None and due[0] > decided_at_s else None

    def _try_find(self, ranked: list[Sequence], chunk_tokens: int) -> tuple[float, list[Sequence]] | None:
        """Who is to give way, and when."""
        for index, sequence in enumerate(ranked):
            since_s = sequence.stalled_since_s
            num_short = sequence.num_pages_short_of_chunk(chunk_tokens) - self._pool.num_free_pages
            if since_s is None or num_short <= 0:  # at most a slot is what it lacks
                continue
            victims = _latest(reversed(ranked[index + 1 :]), num_short)
            if victims:
                return max(since_s + AFTER_S, self._next_at_s), victims
            if _may_give_way(sequence):
                return max(since_s + ALONE_AFTER_S, self._next_at_s), [sequence]
            return None
        return None

    def _give_way(self, sequence: Sequence, now_s: float) -> None:
        page_ids, num_sharable = sequence.private_pages, sequence.num_sharable_private_pages
        sequence.drop_pages(now_s)
        sequence.stalled_since_s = None
        self._pool.put_back(None, page_ids[:num_sharable])
        self._pool.put_back_unused(None, page_ids[num_sharable:])
        self._counters.preemptions += 1
        self._counters.preemptions_dropped += 1


def _latest(candidates: Iterable[Sequence], num_pages: int) -> list[Sequence]:
    """The first candidates that together hold so many pages, or all."""
    victims: list[Sequence] = []
    for sequence in candidates:
        if num_pages <= 0:
            break
        if _may_give_way(sequence):
            victims.append(sequence)
            num_pages -= len(sequence.private_pages)
    return victims


def _may_give_way(sequence: Sequence) -> bool:
    is_half_read = sequence.stage is Stage.RUNNING and bool(sequence.private_pages)
    return is_half_read and sequence.num_preemptions == 0

"""News of the prefixes that a simulated memory keeps, as the scheduler hears them."""

from weir.bus.messages import SCHEDULER_HASH_BYTES
from weir.bus.prefix_news import PrefixChanged
from weir.sim.memory import PrefixMemory
from weir.sim.scheduler import SimScheduler
from weir.sim.timeline import Timeline, ns_of_s

_PREFIX_PERIOD_S = 0.1
"""As transfer services report."""


class SimPrefixEvents:
    """Of one memory. Nothing is lost on the way, so nothing is asked for again."""

    def __init__(self, arena_id: str, memory: PrefixMemory, timeline: Timeline, scheduler: SimScheduler) -> None:
        self._arena_id = arena_id
        self._memory = memory
        self._timeline = timeline
        self._scheduler = scheduler
        self._incarnation = 0
        self._sequence = 0
        self._is_stopped = False

    def stop(self) -> None:
        self._is_stopped = True

    def report(self) -> None:
        """Now, and again after each period."""
        if self._is_stopped:
            return
        index = self._memory.prefixes
        changes = index.changes.take()
        if changes is None:  # too much has changed: everything is sent anew
            self._incarnation += 1
            self._sequence = 0
        if changes is None or changes or self._sequence == 0 or self._timeline.now_ns % ns_of_s(1.0) == 0:
            added = index.hashes() if changes is None else changes.added
            message = PrefixChanged(
                arena_id=self._arena_id,
                incarnation=self._incarnation,
                sequence=self._sequence,
                num_pages=len(index),
                added=_packed(list(added)),
                evicted=_packed(list(changes.evicted if changes else ())),
            )
            self._sequence += 1
            self._scheduler.prefixes_changed(message)
        self._timeline.after(ns_of_s(_PREFIX_PERIOD_S), self.report)


def _packed(hashes: list[bytes]) -> bytes:
    """Sorted, since sets of bytes come in another order in each process."""
    return b"".join(sorted(page_hash[:SCHEDULER_HASH_BYTES] for page_hash in hashes))

"""When the engine may free what it keeps of sequences that ended by themselves.

A gateway has got an end some time after its stream has taken it: what is under way then is lost if this process dies.
Pure: called in the event loop, with an injected clock.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from weir.core.clock import Clock
from weir.engine.loop import InboxFull
from weir.engine.messages import Command, EngineReport, ReleaseEnds, SequenceEnded, SequenceKey

_MAX_KEYS = 256
"""Of one command."""


@dataclass(slots=True)
class _KeptEnd:
    ended_at_s: float
    sent_since_s: float | None = None


class EndReleases:
    """What the engine frees by itself, for want of room, is forgotten here when its time has come too."""

    def __init__(
        self,
        post: Callable[[Command], None],
        is_end_sent: Callable[[SequenceKey], bool],
        clock: Clock,
        *,
        kept_s: float,
        max_kept_s: float,
    ) -> None:
        """An end is kept for `kept_s` after the gateway's stream has taken it, at most for `max_kept_s`. `post` raises
        InboxFull."""
        self._post = post
        self._is_end_sent = is_end_sent
        self._clock = clock
        self._kept_s = kept_s
        self._max_kept_s = max_kept_s
        self._kept: dict[SequenceKey, _KeptEnd] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def on_report(self, report: EngineReport) -> None:
        for event in report.events:
            if isinstance(event, SequenceEnded) and event.is_kept:
                self._kept[event.key] = _KeptEnd(self._clock.now_s())

    def sweep(self) -> None:
        """Call it every now and then; what does not fit into the engine's inbox is posted at a later call."""
        now_s = self._clock.now_s()
        due = self._due(now_s)
        while keys := tuple(islice(due, _MAX_KEYS)):
            try:
                self._post(ReleaseEnds(keys))
            except InboxFull:
                return
            for key in keys:
                del self._kept[key]

    def _due(self, now_s: float) -> Iterator[SequenceKey]:
        for key, kept in list(self._kept.items()):
            if not self._is_end_sent(key):
                kept.sent_since_s = None
            elif kept.sent_since_s is None:
                kept.sent_since_s = now_s
            has_arrived = kept.sent_since_s is not None and now_s >= kept.sent_since_s + self._kept_s
            if has_arrived or now_s >= kept.ended_at_s + self._max_kept_s:
                yield key

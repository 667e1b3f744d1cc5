"""How long a sequence of a running batch did not go on, and why. Counted where it stops and goes on, not by step."""

from dataclasses import dataclass
from typing import NamedTuple


class SequenceWaits(NamedTuple):
    """On one worker, in seconds. Nothing is in two of them."""

    waiting_s: float = 0.0
    """From when it was seen first until it joined the batch."""
    swapped_out_s: float = 0.0
    """Without its pages: they went to the swap file, or were dropped."""
    paused_s: float = 0.0
    """Out of the batch for a more urgent one; its pages stayed."""
    num_preemptions: int = 0
    num_pauses: int = 0


NO_WAITS = SequenceWaits()


@dataclass(slots=True)
class WaitTimes:
    """Of one sequence, added up."""

    waiting_s: float = 0.0
    swapped_out_s: float = 0.0
    paused_s: float = 0.0
    num_pauses: int = 0

    def joined(self, now_s: float, *, first_seen_at_s: float | None, paused_since_s: float | None) -> None:
        """The batch, for the first time or after a pause."""
        if paused_since_s is not None:
            self.paused_s += max(0.0, now_s - paused_since_s)
            self.num_pauses += 1
        elif first_seen_at_s is not None:
            self.waiting_s += max(0.0, now_s - first_seen_at_s)

    def came_back(self, preempted_since_s: float | None, now_s: float) -> None:
        """It has pages again."""
        if preempted_since_s is not None:
            self.swapped_out_s += max(0.0, now_s - preempted_since_s)

    def total(self, num_preemptions: int) -> SequenceWaits:
        return SequenceWaits(self.waiting_s, self.swapped_out_s, self.paused_s, num_preemptions, self.num_pauses)

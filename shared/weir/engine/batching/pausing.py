"""Pauses: sequences leave the batch for more urgent ones and join again when it has room.

A paused sequence waits as one that has not joined yet does, with its slot, record and pages: what it has cost so far is
not lost, unless pages run out (see `preemption`). Who is displaced: the last of the batch, and only by one of a higher
lane, or, where the policy is preemptive, of a better rank in the same lane; by the latter not late in life (TRAIL's
rule: Shahout et al., arXiv 2410.01035). Nobody is paused more than `max_pauses` times, nor again after a pause of
`max_pause_s`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from weir.engine.sequence import Sequence, Stage

MAX_OVERBOOKING = 2
"""Times the sequences that a step may have: so many have slots and pages at most, the paused ones included."""


@dataclass(frozen=True, slots=True)
class PauseSettings:
    """`max_pauses` of one sequence; 0 turns pauses off. Within a lane nobody is paused for whom `max_age` of the output
    that was predicted for it has been sampled."""

    max_pauses: int = 3
    max_pause_s: float = 10.0
    max_age: float = 0.8

    def __post_init__(self) -> None:
        if self.max_pauses < 0 or self.max_pause_s < 0 or not 0 <= self.max_age <= 1:
            raise ValueError(f"{self}: max_pauses and max_pause_s must be at least 0, max_age in [0, 1]")


class Pausing:
    """The rule; the state is in the sequences."""

    def __init__(self, settings: PauseSettings) -> None:
        self._settings = settings
        self.goes_by_rank = False

    def order_of(self, sequence: Sequence) -> tuple[int, float]:
        """The smaller goes first; equals in the order in which they came."""
        params = sequence.params
        return -params.scheduling.lane_priority, params.scheduling.rank if self.goes_by_rank else 0.0

    def is_overdue(self, sequence: Sequence, now_s: float) -> bool:
        """It was paused for so long that it joins before anybody else does."""
        since_s = sequence.paused_since_s
        return since_s is not None and now_s >= since_s + self._settings.max_pause_s

    def try_choose(self, newcomer: Sequence, batch: Iterable[Sequence]) -> Sequence | None:
        """Who of `batch` (the last in order first) is to be paused for the newcomer."""
        urgency, lane = self.order_of(newcomer), newcomer.params.scheduling.lane_priority
        for sequence in batch:
            if self.order_of(sequence) <= urgency:
                return None
            is_below = sequence.params.scheduling.lane_priority < lane
            if sequence.num_pauses < self._settings.max_pauses and (is_below or not self._is_late(sequence)):
                return sequence
        return None

    def begin(self, sequence: Sequence, now_s: float) -> None:
        sequence.stage = Stage.WAITING
        sequence.num_pauses += 1
        sequence.paused_since_s = now_s

    def end(self, sequence: Sequence, now_s: float) -> None:
        """It has joined the batch, again or for the first time."""
        if self.is_overdue(sequence, now_s):
            sequence.num_pauses = self._settings.max_pauses
        sequence.paused_since_s = None

    def _is_late(self, sequence: Sequence) -> bool:
        predicted = sequence.params.scheduling.predicted_output_tokens
        return predicted > 0 and sequence.num_output_tokens >= self._settings.max_age * predicted

"""Rests: sequences that give their place in the batch to more urgent ones and take the next that is free.

A sequence that rests waits as one that has not joined yet does, with its slot, record and pages: what it has cost so
far is not lost, unless pages run out (see `preemption`). Who is displaced: the last of the batch, and only by one of a
higher lane, or, where the policy is preemptive, of a better rank in the same lane; by the latter not late in life
(TRAIL's rule: Shahout et al., arXiv 2410.01035). Nobody is displaced more than `max_pauses` times, nor after a rest of
`max_pause_s`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from weir.engine.sequence import Sequence, Stage

MAX_OVERBOOKING = 2
"""Times the places of the batch: so many prompts have slots and pages at most, those that rest among them."""


@dataclass(frozen=True, slots=True)
class RestSettings:
    """`max_pauses` of one sequence; 0 turns displacing off. Within a lane nobody rests who has drawn `max_age` of the
    output that was predicted for it."""

    max_pauses: int = 3
    max_pause_s: float = 10.0
    max_age: float = 0.8

    def __post_init__(self) -> None:
        if self.max_pauses < 0 or self.max_pause_s < 0 or not 0 <= self.max_age <= 1:
            raise ValueError(f"{self}: max_pauses and max_pause_s must be at least 0, max_age in [0, 1]")


class Pausing:
    """The rule; what it decides is in the sequences. `settings` None: nobody is displaced."""

    def __init__(self, settings: RestSettings) -> None:
        self._settings = settings
        self.goes_by_rank = False

    def order_of(self, sequence: Sequence) -> tuple[int, float]:
        """The smaller goes first; equals in the order in which they came."""
        params = sequence.params
        return -params.scheduling.lane_priority, params.scheduling.rank if self.goes_by_rank else 0.0

    def is_overdue(self, sequence: Sequence, now_s: float) -> bool:
        """It takes the next place before anybody else does."""
        since_s = sequence.paused_since_s
        return since_s is not None and now_s >= since_s + self._settings.max_pause_s

    def try_choose(self, newcomer: Sequence, batch: Iterable[Sequence]) -> Sequence | None:
        """Who of `batch` is to rest for the newcomer; the last in order is asked first."""
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

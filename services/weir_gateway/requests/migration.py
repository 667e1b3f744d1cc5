"""When a request that runs at one host goes on at another: once nearly all of its pages are there.

    staging ── little is left ──────────────────────> switch: the next dispatch begins there, after the tokens so far
       └────── no pages come, the other one is gone, too late ──> abandon: it goes on where it is, as it would have

What is behind the last page that came is computed again there. A page comes some milliseconds after it is full: just
then the least is left. Its tokens do not depend on who computes them, so that either way it may stop anywhere.
"""

from dataclasses import dataclass
from enum import Enum

from weir.bus.messages import Placement
from weir.core.errors import Unavailable
from weir.wire.v1 import worker_pb2


@dataclass(frozen=True, slots=True)
class MigrationSettings:
    """`near_tokens`: so few may be left to compute there, the last one among them; `far_tokens`: so few, once it has
    gone on for `patience_s` without that, or when no more pages come. `first_answer_s`: until the other host has said
    anything; `longest_s`: for all of it. `answer_s`: from the switch to the first token of the new worker; later it is
    placed again."""

    near_tokens: int = 6
    far_tokens: int = 32
    first_answer_s: float = 3.0
    patience_s: float = 4.0
    longest_s: float = 8.0
    answer_s: float = 1.0


class MigrationVerdict(Enum):
    """What is to become of a migration now."""

    WAIT = "wait"
    SWITCH = "switch"
    ABANDON = "abandon"


class Moved(Unavailable):
    """The request is to go on under this placement: why its present dispatch ends."""

    def __init__(self, placement: Placement) -> None:
        super().__init__(f"it goes on at worker {placement.decode_worker_id}")
        self.placement = placement


class Migration:
    """Of one request, from its host to that of `placement`. Pure; times of one clock."""

    def __init__(
        self, placement: Placement, pages_address: str, began_at_s: float, settings: MigrationSettings
    ) -> None:
        self.placement = placement
        self.pages_address = pages_address
        self._began_at_s = began_at_s
        self._settings = settings
        self._num_staged_tokens: int | None = None
        """None: nothing is known yet."""
        self.problem = ""
        """Why no more pages come."""

    def staged(self, told: worker_pb2.StagedPages) -> None:
        """What the other host says; of another dispatch it is ignored, and so is what takes back something."""
        if told.attempt.dispatch != self.placement.dispatch:
            return
        if not told.problem:
            self._num_staged_tokens = max(self._num_staged_tokens or 0, told.num_tokens)
        self.problem = self.problem or told.problem

    def fail(self, problem: str) -> None:
        """The other host cannot be reached."""
        self._num_staged_tokens = None
        self.problem = problem

    def verdict(self, num_tokens: int, now_s: float) -> MigrationVerdict:
        """`num_tokens`: of prompt and output so far."""
        settings, staged = self._settings, self._num_staged_tokens
        spent_s = now_s - self._began_at_s
        if staged is None:
            return (
                MigrationVerdict.ABANDON
                if self.problem or spent_s >= settings.first_answer_s
                else MigrationVerdict.WAIT
            )
        num_left = num_tokens - staged
        if num_left <= settings.near_tokens:
            return MigrationVerdict.SWITCH
        if (self.problem or spent_s >= settings.patience_s) and num_left <= settings.far_tokens:
            return MigrationVerdict.SWITCH
        return MigrationVerdict.ABANDON if self.problem or spent_s >= settings.longest_s else MigrationVerdict.WAIT

"""What lanes are guaranteed of the prompt tokens of a step, beside the order of urgency.

Every lane with prompts gets its share first, as far as it has work for it; what it leaves is lent, the most urgent lane
first. So a step is full while anybody has work, and in a lane nobody overtakes. Decodes take one token each and are in
the step anyway: shares are of what is left for prompts.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from math import floor
from typing import NamedTuple

_ROUNDING = 1e-9
"""Shares such as 0.29 of 100 are a little under the number that is meant."""


class PromptWork(NamedTuple):
    """Prompt tokens that one sequence can have computed in this step."""

    lane_priority: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepShares:
    """Lane priority -> share; they are at most 1 in all. Lanes without one are not here."""

    by_lane: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, shares: Seq[float]) -> "StepShares":
        """By lane priority, the least urgent lane first. Raises ValueError."""
        if not all(0 <= share <= 1 for share in shares) or sum(shares) > 1 + _ROUNDING:
            raise ValueError(f"step_shares {list(shares)}: each must be in [0, 1], and all together at most 1")
        return cls({priority: share for priority, share in enumerate(shares) if share})

    def __bool__(self) -> bool:
        return bool(self.by_lane)

    def split(self, work: Seq[PromptWork], num_tokens: int, max_rows: int) -> list[int]:
        """Tokens of each of `work`, which is in the order in which it is to be served; 0: it is not in this step.

        At most `max_rows` of them get any. A lane with a share gets as large a part of the rows, and at least one while
        there is one left.
        """
        given = [0] * len(work)
        num_left, num_rows_left = num_tokens, max_rows
        for lane, share in sorted(self.by_lane.items(), reverse=True):
            own, rows = floor(share * num_tokens + _ROUNDING), max(1, floor(share * max_rows + _ROUNDING))
            rows = min(rows, num_rows_left)
            for index, (priority, wanted) in enumerate(work):
                if priority == lane and own > 0 and rows > 0 and wanted > 0:
                    given[index] = min(wanted, own)
                    own -= given[index]
                    num_left -= given[index]
                    rows -= 1
                    num_rows_left -= 1
        for index, (_, wanted) in enumerate(work):
            if num_left <= 0:
                break
            if not given[index]:
                if num_rows_left <= 0 or wanted <= 0:
                    continue
                num_rows_left -= 1
            more = min(wanted - given[index], num_left)
            given[index] += more
            num_left -= more
        return given


NO_SHARES = StepShares()

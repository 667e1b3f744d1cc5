"""What the planner says: for each pool how many workers it wants, why, and what would change that now."""

from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from weir.core.roles import WORKER_ROLES, WorkerRole
from weir.planner.observation import other_role


class Reason(StrEnum):
    """The one that decided."""

    HOLD = "hold"
    FLOOR = "floor"
    """Fewer do not hold the SLO under the load that is expected."""
    BACKLOG = "backlog"
    """Prompts wait for longer than the SLO leaves them."""
    BOOKED = "booked"
    """Decode workers have given nearly all of their pages or sequences away."""
    ITL = "itl"
    """Answers come slower than the SLO wants."""
    SPARE = "spare"
    """One less holds the SLO at a higher rate, and has for long."""
    SWITCHED = "switched"
    """It gives a worker to the other pool."""
    PENDING = "pending"
    """An earlier change of the pool is not done yet."""
    KEPT = "kept"
    """So many were wanted within a start time, and what was ordered, or restarts, is not seen."""
    OSCILLATING = "oscillating"
    """It would go down, and has gone up and down too often lately."""
    STATIC = "static"
    """The model is wrong about what is measured, so nothing is taken away."""
    BOUND = "bound"
    """More or fewer are wanted than may be."""


@dataclass(frozen=True, slots=True)
class PoolDecision:
    """`wanted` is what is to be; `delta` what is to be begun now, beside what is pending already."""

    wanted: int
    current: int
    """Serving or starting."""
    floor: int
    reason: Reason

    @property
    def delta(self) -> int:
        return self.wanted - self.current


@dataclass(frozen=True, slots=True)
class Switch:
    """One worker changes its role."""

    from_role: WorkerRole
    to_role: WorkerRole


@dataclass(frozen=True, slots=True)
class Decision:
    """Predictions are of the pools that there are, under the load that is expected; infinite or NaN: not known."""

    number: int
    """Counted from 1 by the planner that made it."""
    at_s: float
    prefill: PoolDecision
    decode: PoolDecision
    switch: Switch | None
    """One of the changes is made by this; the rest by starting and ending workers."""
    rate_a_s: float
    predicted_rate_a_s: float
    predicted_ttft_s: float
    predicted_itl_s: float
    predicted_attainment: float
    is_fallback: bool
    num_reversals: int

    def of(self, role: WorkerRole) -> PoolDecision:
        return self.prefill if role == "prefill" else self.decode

    @property
    def is_change(self) -> bool:
        return self.prefill.delta != 0 or self.decode.delta != 0

    def num_to_start(self, role: WorkerRole) -> int:
        """Workers to start in this role, beside the one that switches; negative: to end."""
        if self.switch is None:
            return self.of(role).delta
        return self.of(role).delta - (1 if self.switch.to_role == role else -1)

    def as_dict(self) -> dict[str, Any]:
        """For a log."""
        found = asdict(self)
        for role in WORKER_ROLES:
            found[role] |= {"delta": found[role]["wanted"] - found[role]["current"]}
        return found


def only_more(decision: Decision, role: WorkerRole, num: int) -> Decision:
    """What is left of a decision of which only this is done: so many workers more of a role, and no switch."""
    more, other = decision.of(role), decision.of(other_role(role))
    more, other = replace(more, wanted=more.current + num), replace(other, wanted=other.current)
    prefill, decode = (more, other) if role == "prefill" else (other, more)
    return replace(decision, prefill=prefill, decode=decode, switch=None)

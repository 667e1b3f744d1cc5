"""How a request is ranked against others, everywhere after its grant: on the wire, in its record, in batches."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulingParams:
    """The scheduler's word, carried whole to whoever has to choose between sequences."""

    lane_priority: int = 0
    """Higher is more urgent."""
    rank: float = 0.0
    """Inside a lane, lower goes first where a policy preempts."""
    itl_target_ms: int = 0
    """Between two tokens; 0: none."""
    predicted_output_tokens: float = 0.0
    """0.0: not known."""


NO_PREFERENCE = SchedulingParams()
"""Of a request that nothing is known of."""

"""The life of a request, the attempts that it is made of, and how it is ranked against others while it lasts.

    RECEIVED ─┬─> QUEUED ──> GRANTED ──> PREFILLING ──> HANDING_OFF ──> DECODING ─┬─> FINISHED
              │     │           │            │               │             │      │
              │     └───────────┴────────────┴───────────────┴─────────────┴──────┼─> CANCELLED
              └─> REFUSED                                                         └─> FAILED

PREFILLING and HANDING_OFF go straight to FINISHED when the first token is the last, and every phase does at a deadline
whose client wants what there is by then. Every request ends in exactly one
of the four terminal phases, and the gateway that drives it decides which.
"""

from dataclasses import dataclass
from enum import Enum, StrEnum
from functools import lru_cache


class Phase(Enum):
    """Where a request is."""

    RECEIVED = "received"
    QUEUED = "queued"
    GRANTED = "granted"
    PREFILLING = "prefilling"
    HANDING_OFF = "handing_off"
    DECODING = "decoding"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"
    REFUSED = "refused"

    @property
    def is_terminal(self) -> bool:
        return self in _TERMINAL


class FinishReason(StrEnum):
    """Why an answer ended without an error."""

    STOP = "stop"
    """At a stop token or a stop string."""
    LENGTH = "length"
    """At `max_tokens`, or where the context is full."""
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    """Its deadline passed, and the client wanted what there was by then."""
    TOOL_CALLS = "tool_calls"
    """After calls of tools, which the client is to run: what clients of gRPC are told in place of STOP."""


_TERMINAL = frozenset({Phase.FINISHED, Phase.CANCELLED, Phase.FAILED, Phase.REFUSED})

_NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.RECEIVED: frozenset({Phase.QUEUED}) | _TERMINAL,
    Phase.QUEUED: frozenset({Phase.GRANTED}) | _TERMINAL,
    Phase.GRANTED: frozenset({Phase.PREFILLING, Phase.QUEUED}) | _TERMINAL,
    Phase.PREFILLING: frozenset({Phase.HANDING_OFF, Phase.DECODING, Phase.QUEUED}) | _TERMINAL,
    Phase.HANDING_OFF: frozenset({Phase.DECODING, Phase.QUEUED}) | _TERMINAL,
    Phase.DECODING: frozenset({Phase.QUEUED}) | _TERMINAL,
}


class IllegalTransition(Exception):
    """A defect: the request cannot go there from here."""


def check_transition(request_id: str, current: Phase, following: Phase) -> None:
    """Raises IllegalTransition unless the diagram has an arrow from `current` to `following`."""
    if following not in _NEXT.get(current, frozenset()):
        raise IllegalTransition(f"request {request_id}: {current.value} -> {following.value} is not in the diagram")


@dataclass(frozen=True, slots=True, order=True)
class Attempt:
    """The epoch of a request, ordered by (dispatch, adoption): a re-dispatch raises the first, an adoption the second.

    Whoever holds state of a request refuses everything that carries an older attempt than the newest one seen.
    """

    dispatch: int = 1
    adoption: int = 0


@lru_cache(maxsize=1024)
def attempt_of(dispatch: int, adoption: int) -> Attempt:
    """Mostly the same object for the same numbers: each token's message names one of few attempts."""
    return Attempt(dispatch, adoption)


@dataclass(frozen=True, slots=True)
class SchedulingParams:
    """How a request is ranked after its grant: on the wire, in its record, and by whoever chooses in a batch."""

    lane_priority: int = 0
    """Higher is more urgent."""
    rank: float = 0.0
    """Inside a lane, lower goes first where a policy preempts."""
    itl_target_ms: int = 0
    """Between two tokens; 0: none."""
    predicted_output_tokens: float = 0.0
    """0.0: not known."""


NO_PREFERENCE = SchedulingParams()
"""Of a request that no scheduler has ranked."""

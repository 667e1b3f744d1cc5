"""What the tuner says is to be done."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from weir.planner.tuning.settings import Knob


class Deed(StrEnum):
    """What is to be done to workers' bounds."""

    TRY = "try"
    """The canaries get the value, as long as somebody goes on saying so."""
    KEEP = "keep"
    """The canaries' value is that of the role from now on."""
    END = "end"
    """The canaries are as the others again."""


class Cause(StrEnum):
    """Why."""

    MISSED = "missed"
    """Too many tokens come later than the SLO wants."""
    WAITING = "waiting"
    """Requests wait while tokens come in time."""
    BETTER = "better"
    """The canaries were."""
    WORSE = "worse"
    """The canaries were."""
    HARM = "harm"
    """The canaries did less than half of what the others did, twice in a row."""
    UNDECIDED = "undecided"
    """The trial has shown nothing in all its windows."""
    RELAPSE = "relapse"
    """What was kept is worse for all than what was before."""
    LOST = "lost"
    """One of either side serves no more, or runs under another bound: somebody else has changed it."""


@dataclass(frozen=True, slots=True)
class TuningStep:
    """`worker_ids`: the canaries; `rest_ids`: those beside which they are judged. `figures`: what it was decided by, by
    names with their units."""

    deed: Deed
    knob: Knob
    value: int
    was: int
    cause: Cause
    worker_ids: tuple[str, ...]
    rest_ids: tuple[str, ...]
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def reason(self) -> str:
        """In one line, for a log of changes."""
        figures = ", ".join(f"{name} {value:.4g}" for name, value in self.figures.items())
        return f"{self.cause}: {figures}" if figures else str(self.cause)

    def as_dict(self) -> dict[str, Any]:
        """For a log."""
        return {
            "deed": str(self.deed),
            "bound": f"{self.knob.role}.{self.knob.bound}",
            "value": self.value,
            "was": self.was,
            "cause": str(self.cause),
            "workers": list(self.worker_ids),
            "figures": {name: round(value, 6) for name, value in self.figures.items()},
        }

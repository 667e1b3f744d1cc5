"""What a world is made from, and what became of it."""

from dataclasses import dataclass, field

CROSSING_ROLES = ("prefix-sender", "prefix-receiver", "sequence-sender", "sequence-receiver")


@dataclass(frozen=True)
class Plan:
    """What a seed stands for; replaced in part to shrink a story."""

    seed: int
    mix: frozenset[str] | None = None
    max_requests: int | None = None
    cut: tuple[str, int] | None = None
    """(role, write): in a small world without other faults, the first process of that role dies in that write into the
    segment. Of CROSSING_ROLES: in one with two hosts, between which a prefix or a running sequence crosses, that side's
    transfer service dies so many events of both after the crossing began."""
    mutant: str = ""
    """With this defect on purpose (`tests.simulation.mutants`)."""


@dataclass
class Result:
    """What became of one world. `broken` empty: every promise was kept."""

    plan: Plan
    mix: tuple[str, ...]
    num_requests: int
    num_events: int
    num_faults: int
    """That had an effect, lost messages not counted."""
    virtual_s: float
    trace: int
    broken: str
    story: list[str] = field(default_factory=list)
    ends: dict[str, int] = field(default_factory=dict)
    """Of its requests: FINISHED, the code of a failure, or LEFT."""
    num_writes: dict[str, int] = field(default_factory=dict)
    """Into segments, by the first process of each role; for CROSSING_ROLES, events of both sides of what crosses."""
    crossed: dict[str, int] = field(default_factory=dict)
    """Between hosts: transfers that were begun, and pages that came."""
    struck: dict[str, int] = field(default_factory=dict)
    """How often each kind of fault had an effect; `mix` is what could have happened."""

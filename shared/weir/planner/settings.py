"""What the planner is told: its goal, its bounds, and how patient it is."""

import dataclasses
import math
from dataclasses import dataclass, fields

from weir.planner.observation import Pools

_LEAST, _MOST = Pools(1, 1), Pools(16, 16)
_TIMES = ("window_s", "tick_s", "start_s", "switch_s", "floor_every_s", "down_after_s", "dwell_s", "reversal_window_s")


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """Times in seconds, rates and shares without a unit."""

    ttft_slo_s: float
    itl_slo_s: float
    target: float = 0.95
    """Share of the requests that must meet both."""
    margin: float = 0.02
    """By so much more the floor must meet the target in the model."""
    least: Pools = _LEAST
    most: Pools = _MOST
    fallback: Pools | None = None
    """What there is at least while the model is wrong; None: as many as there are then."""
    window_s: float = 60.0
    tick_s: float = 5.0
    start_s: float = 120.0
    """From the order of a worker until it serves: how far ahead one must look."""
    switch_s: float = 3.0
    """From the end of a worker's drain until it serves in the other role, before any switch was measured."""
    may_switch: bool = True
    keeps_orders: bool = False
    """Others go by `wanted` and start workers that are not seen: for a start time it falls only for one to spare."""
    floor_every_s: float = 60.0
    num_ticks: int = 3
    """So many in a row must show pressure before the fast loop acts."""
    backlog_share: float = 0.5
    """Of the TTFT SLO: a longer backlog is pressure on prefill workers."""
    booked_share: float = 0.85
    """A higher one is pressure on decode workers."""
    idle_share: float = 0.6
    """Below it a pool may give a worker to the other one."""
    down_factor: float = 1.2
    """One worker less must hold the SLO at so many times the rate …"""
    down_after_s: float = 300.0
    """… in all looks of so long a time."""
    dwell_s: float = 60.0
    """Between two switches of roles; and at least ten times what a switch takes."""
    reversal_window_s: float = 600.0
    max_reversals: int = 3
    """Changes of direction within the window from which on nothing goes down any more, for as long again."""
    max_error: float = 2.0
    """The model is off when TTFT differs from its prediction by more than this factor …"""
    num_windows_off: int = 3
    """… in so many windows in a row."""

    def __post_init__(self) -> None:
        for name in ("ttft_slo_s", "itl_slo_s", *_TIMES):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} {getattr(self, name)}: must be finite and over 0")
        for name in ("target", "backlog_share", "booked_share", "idle_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} {getattr(self, name)}: must be over 0 and at most 1")
        if not 0 <= self.margin < 1:
            raise ValueError(f"margin {self.margin}: must be at least 0 and below 1")
        for name in ("num_ticks", "max_reversals", "num_windows_off"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: must be at least 1")
        for name in ("down_factor", "max_error"):
            if not 1 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} {getattr(self, name)}: must be finite and at least 1")
        if min(self.least) < 1:
            raise ValueError(f"least {tuple(self.least)}: must be at least 1 of each role")
        if self.most.prefill < self.least.prefill or self.most.decode < self.least.decode:
            raise ValueError(f"most {tuple(self.most)}: must not be below least {tuple(self.least)}")

    @property
    def floor_target(self) -> float:
        return min(1.0, self.target + self.margin)

    def at_pace(self, factor: float) -> "PlannerSettings":
        """All times but the SLOs multiplied: for a load whose time was compressed."""
        times = {name: getattr(self, name) * factor for name in _TIMES}
        return dataclasses.replace(self, **times)

    def as_dict(self) -> dict[str, object]:
        """For a log: what a decision was made under."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}

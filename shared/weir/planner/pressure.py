"""The fast loop: what shows at once that a pool is too small, and must show for some ticks in a row."""

from weir.core.roles import WORKER_ROLES, WorkerRole
from weir.planner.capacity import CapacityModel
from weir.planner.decision import Reason
from weir.planner.observation import Observation
from weir.planner.settings import PlannerSettings


class Pressure:
    """Prompts wait for a decode worker's pages as for a prefill worker's time; so a backlog is held against the prefill
    workers only while decode workers have room."""

    def __init__(self, settings: PlannerSettings, capacity: CapacityModel) -> None:
        self._settings = settings
        self._capacity = capacity
        self._num_ticks = dict.fromkeys(WORKER_ROLES, 0)
        self._reasons: dict[WorkerRole, Reason] = {}

    def add(self, seen: Observation) -> None:
        """Once a tick."""
        reasons: dict[WorkerRole, Reason | None] = {"prefill": self._on_prefill(seen), "decode": self._on_decode(seen)}
        for role, reason in reasons.items():
            if reason is None:
                self._num_ticks[role] = 0
            else:
                self._num_ticks[role] += 1
                self._reasons[role] = reason

    def of(self, role: WorkerRole) -> Reason | None:
        """None: there is none, or not for long enough."""
        return self._reasons[role] if self._num_ticks[role] >= self._settings.num_ticks else None

    def is_any(self, role: WorkerRole) -> bool:
        """In the last tick."""
        return self._num_ticks[role] > 0

    def busy_share(self, role: WorkerRole, seen: Observation, rate_a_s: float, mean_uncached_tokens: float) -> float:
        """Of a pool that serves: its time that arriving prompts take, or what decode workers have booked."""
        if role == "decode":
            return seen.booked_share
        num_serving = max(1, seen.prefill.serving)
        return rate_a_s * self._capacity.prefill_s(mean_uncached_tokens) / num_serving

    def backlog_s(self, seen: Observation) -> float:
        """Until the prefill workers that serve now have computed what waits."""
        return self._capacity.prefill_s(seen.num_backlog_tokens) / max(1, seen.prefill.serving)

    def _on_prefill(self, seen: Observation) -> Reason | None:
        is_long = self.backlog_s(seen) > self._settings.backlog_share * self._settings.ttft_slo_s
        return Reason.BACKLOG if is_long and seen.booked_share <= self._settings.booked_share else None

    def _on_decode(self, seen: Observation) -> Reason | None:
        if seen.booked_share > self._settings.booked_share:
            return Reason.BOOKED
        return Reason.ITL if seen.num_itl_met < self._settings.target * seen.num_ended else None

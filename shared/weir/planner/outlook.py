"""The slow loop: what the model says of the load that is expected, and whether it is right about what is measured."""

import math
from dataclasses import replace

from weir.core.roles import WORKER_ROLES, WorkerRole
from weir.planner.capacity import CapacityModel, Prediction
from weir.planner.forecast import RateTrend
from weir.planner.observation import ExpectedLoad, Observation, Pools, Window
from weir.planner.settings import PlannerSettings

_UNKNOWN = Prediction(math.nan, math.nan, math.nan)
_OUTGROWN = 1.1
"""Times the expected rate: then one does not wait for the next look."""
_ERROR_MATTERS_ABOVE = 0.5
"""Of the TTFT SLO: where both, what is predicted and what is measured, are below, an error changes nothing."""


class Outlook:
    """Of one stack. Looks ahead every `floor_every_s`; between two looks everything is as at the last."""

    def __init__(self, settings: PlannerSettings, capacity: CapacityModel) -> None:
        self.floor = settings.least
        self.prediction = _UNKNOWN
        """Of the pools that there are, under the load that is expected."""
        self.load: ExpectedLoad | None = None
        """That is expected."""
        self._settings = settings
        self._capacity = capacity
        self._trend = RateTrend(settings.window_s)
        self._looked_at_s = -math.inf
        self._spare_since_s: dict[WorkerRole, float | None] = dict.fromkeys(WORKER_ROLES)
        self._spare_pools: Pools | None = None
        self._num_off = 0
        self._num_right = 0
        self.is_model_wrong = False

    def look(self, window: Window, seen: Observation) -> None:
        """When it is time, or more comes than was expected. `seen` is the newest of the window."""
        at_s, pools = seen.at_s, seen.pools
        self._forget_changed(pools)
        self._trend.add(at_s, window.rate_a_s)
        is_outgrown = self.load is not None and window.rate_a_s > _OUTGROWN * self.load.rate_a_s
        if at_s - self._looked_at_s < self._settings.floor_every_s and not is_outgrown:
            return
        self._looked_at_s = at_s
        prompts, outputs = window.lengths()
        if window.rate_a_s > 0 and not (prompts and outputs):
            return  # no answer has ended yet
        rate_a_s = self._trend.ahead(self._horizon_s, window.rate_a_s)
        load = ExpectedLoad(rate_a_s, prompts, outputs, window.cached_share)
        self.load = replace(load, rate_a_s=rate_a_s + self._queue_rate_a_s(load, seen))
        self.floor = self._capacity.least_pools(self.load, self._settings.floor_target, self._settings.most)
        self.prediction = self._capacity.predict(self.load, pools)
        self._judge_model(replace(self.load, rate_a_s=window.rate_a_s), window, pools)
        self._note_spare(at_s, pools)

    @property
    def _horizon_s(self) -> float:
        """From the middle of the window until workers serve that the next look orders."""
        return self._settings.window_s / 2 + self._settings.floor_every_s + self._settings.start_s

    def _queue_rate_a_s(self, load: ExpectedLoad, seen: Observation) -> float:
        """What waits beyond the SLO is served while the workers that are started for it are there anyway."""
        num_waiting = seen.num_backlog_tokens / max(1.0, load.mean_uncached_tokens)
        return max(0.0, num_waiting - load.rate_a_s * self._settings.ttft_slo_s) / self._settings.down_after_s

    def has_spare(self, role: WorkerRole, at_s: float) -> bool:
        """One worker less has held the SLO at a higher rate for long enough."""
        since_s = self._spare_since_s[role]
        return since_s is not None and at_s - since_s >= self._settings.down_after_s

    def forget_spare(self, role: WorkerRole) -> None:
        """Its last worker to spare is being taken: the next one has to show anew."""
        self._spare_since_s[role] = None

    def _note_spare(self, at_s: float, pools: Pools) -> None:
        assert self.load is not None, "only after a look"
        heavier = replace(self.load, rate_a_s=self.load.rate_a_s * self._settings.down_factor)
        for role in WORKER_ROLES:
            fewer = pools.plus(role, -1)
            can_go = fewer.of(role) >= self._settings.least.of(role)
            if not (can_go and self._capacity.predict(heavier, fewer).attainment >= self._settings.target):
                self._spare_since_s[role] = None
            elif self._spare_since_s[role] is None:
                self._spare_since_s[role] = at_s

    def _forget_changed(self, pools: Pools) -> None:
        """At every look, whoever changed them: the next worker to spare has to show anew."""
        for role in WORKER_ROLES:
            if self._spare_pools is not None and self._spare_pools.of(role) != pools.of(role):
                self.forget_spare(role)
        self._spare_pools = pools

    def _judge_model(self, load: ExpectedLoad, window: Window, pools: Pools) -> None:
        """Pools that change cannot be compared, nor two queues that both grow."""
        measured_s = window.ttft_s
        if measured_s is None or window.has_changed:
            return
        predicted_s, slo_s = self._capacity.predict(load, pools).ttft_s, self._settings.ttft_slo_s
        low_s, high_s = min(measured_s, predicted_s), max(measured_s, predicted_s)
        if low_s > slo_s:
            return
        is_off = high_s > _ERROR_MATTERS_ABOVE * slo_s and high_s > self._settings.max_error * low_s
        self._num_off, self._num_right = (self._num_off + 1, 0) if is_off else (0, self._num_right + 1)
        if self._num_off >= self._settings.num_windows_off:
            self.is_model_wrong = True
        elif self._num_right >= self._settings.num_windows_off:
            self.is_model_wrong = False

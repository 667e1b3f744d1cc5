"""What a worker's steps cost, fitted to the newest of them: for the registry, for metrics, and for `weir profile`."""

from collections import deque
from collections.abc import Mapping
from dataclasses import fields

from weir.core.clock import Clock
from weir.core.cost import StepCost
from weir.core.cost_fit import CostFit, CostSample, try_fit_cost
from weir.engine.messages import EngineReport

_EVERY_S = 5.0
_MAX_STEPS = 4096
METRIC_PREFIX = "step_cost_"
MEAN_PREFIX = "step_cost_mean_"
CONTENTION = "step_cost_contention"


class CostMeter:
    """Fits at most every few seconds, and only to steps that tell the terms apart; until then there is no cost."""

    def __init__(self, clock: Clock, *, must_decode: bool) -> None:
        """`must_decode`: False for a worker that only prefills."""
        self._clock = clock
        self._must_decode = must_decode
        self._newest: deque[CostSample] = deque(maxlen=_MAX_STEPS)
        self._num_new = 0
        self._fit: CostFit | None = None
        self._fitted_at_s = clock.now_s()

    def on_report(self, report: EngineReport) -> None:
        timing = report.timing
        if timing is not None and timing.duration_s > 0:
            self._newest.append(CostSample(*timing.load, timing.duration_s * 1e3, timing.mean_others))
            self._num_new += 1

    def cost(self) -> StepCost | None:
        """The newest fit; None until steps have differed enough."""
        now_s = self._clock.now_s()
        if self._num_new and now_s >= self._fitted_at_s + _EVERY_S:
            self._fitted_at_s, self._num_new = now_s, 0
            self._fit = try_fit_cost(tuple(self._newest), must_decode=self._must_decode) or self._fit
        return None if self._fit is None else self._fit.cost

    def metrics(self) -> Mapping[str, float]:
        """Coefficients in milliseconds and how well they fit; empty while there is no cost."""
        fit = self._fit
        if fit is None:
            return {}
        costs = ((METRIC_PREFIX, fit.cost), (MEAN_PREFIX, fit.mean_cost))
        coefficients = {
            prefix + entry.name: getattr(cost, entry.name) for prefix, cost in costs for entry in fields(cost)
        }
        quality = {"steps": fit.num_samples, "r2": fit.r2, "error_p05": fit.error_p05, "error_p95": fit.error_p95}
        measured = {METRIC_PREFIX + name: float(value) for name, value in quality.items()}
        return coefficients | measured | {CONTENTION: fit.contention}

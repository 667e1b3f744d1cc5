"""What `weir planner` tells: a line of JSON for each decision that is news, and a page of metrics."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from weir.core.roles import WORKER_ROLES
from weir.planner.decision import Decision
from weir.telemetry.families import Family, Kind, Sample

_BY_ROLE: Mapping[str, tuple[str, str]] = {
    "weir_planner_wanted_workers": ("wanted", "Workers that there should be; what autoscalers ask for."),
    "weir_planner_current_workers": ("current", "Workers that serve or start, as it saw them."),
    "weir_planner_floor_workers": ("floor", "The fewest that hold the SLO under the expected load, by the model."),
}
_OF_DECISIONS: Mapping[str, tuple[str, str]] = {
    "weir_planner_predicted_requests_per_second": ("predicted_rate_a_s", "Requests that are expected."),
    "weir_planner_predicted_ttft_seconds": ("predicted_ttft_s", "Mean time to first token that the model expects."),
    "weir_planner_predicted_itl_seconds": ("predicted_itl_s", "Mean time of a token that the model expects."),
    "weir_planner_predicted_attainment": ("predicted_attainment", "Share that is expected to meet the SLO."),
    "weir_planner_is_fallback": ("is_fallback", "Whether the model is wrong, so that nothing is taken away."),
    "weir_planner_reversals": ("num_reversals", "Changes of direction in the last ten minutes."),
}
_COUNTED: Mapping[str, str] = {
    "weir_planner_decisions": "Decisions that were made.",
    "weir_planner_looks_without_figures": "Looks at which a figure was missing, so that nothing was said.",
    "weir_planner_switches_begun": "Changes of roles that it began.",
    "weir_planner_switches_failed": "Changes of roles or of spares that were refused or did not come.",
    "weir_planner_spares_used": "Spares that it had take work.",
}
FIGURES: Mapping[str, str] = {
    name: text for names in (_BY_ROLE, _OF_DECISIONS) for name, (_, text) in names.items()
} | {f"{name}_total": text for name, text in _COUNTED.items()}
"""All that is on the page."""


class PlannerPage:
    """May be read in another thread. An old decision is not shown: an autoscaler would go by it for ever."""

    def __init__(self, max_age_s: float, now_s: Callable[[], float] = time.monotonic) -> None:
        self._max_age_s = max_age_s
        self._now_s = now_s
        self._newest: tuple[float, Decision] | None = None
        self._counts = dict.fromkeys(_COUNTED, 0)

    def show(self, decision: Decision) -> None:
        self._newest = (self._now_s(), decision)
        self.count("decisions")

    def count(self, what: str) -> None:
        """One of the counters, by its name without `weir_planner_`."""
        self._counts[f"weir_planner_{what}"] += 1

    def families(self) -> list[Family]:
        return list(self._families())

    def _families(self) -> Iterator[Family]:
        for name, number in self._counts.items():
            yield Family(f"{name}_total", Kind.COUNTER, _COUNTED[name], (Sample(number),))
        newest = self._newest
        if newest is None or self._now_s() - newest[0] > self._max_age_s:
            return
        decision = newest[1]
        for name, (attribute, text) in _BY_ROLE.items():
            samples = tuple(Sample(getattr(decision.of(role), attribute), (("role", role),)) for role in WORKER_ROLES)
            yield Family(name, Kind.GAUGE, text, samples)
        for name, (attribute, text) in _OF_DECISIONS.items():
            value = float(getattr(decision, attribute))
            if not math.isnan(value):
                yield Family(name, Kind.GAUGE, text, (Sample(value),))


class DecisionLog:
    """Of the decisions that are news, and of one in every so many seconds anyway."""

    def __init__(self, write: Callable[[str], None], every_s: float, mode: str) -> None:
        self._write = write
        self._every_s = every_s
        self._mode = mode
        self._last_news: object = None
        self._last_at_s = -math.inf

    def decided(self, decision: Decision) -> None:
        news = (decision.prefill, decision.decode, decision.switch, decision.is_fallback)
        if news == self._last_news and decision.at_s - self._last_at_s < self._every_s:
            return
        self._last_news, self._last_at_s = news, decision.at_s
        self.note("decision", **decision.as_dict())

    def note(self, event: str, **values: Any) -> None:
        """One line, whatever it is."""
        finite = {
            name: None if isinstance(one, float) and not math.isfinite(one) else one for name, one in values.items()
        }
        self._write(json.dumps({"time": round(time.time(), 3), "event": event, "mode": self._mode, **finite}))

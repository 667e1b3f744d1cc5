"""One load under everybody who may decide: what it cost, and what share of the requests met its SLO.

peak       the fewest workers, all the time, that meet the target: found with the whole load known
mean       the fewest that hold the load's mean rate, all the time
hpa, step  simple rules
planner    floor and fast loop, with and without role switches
oracle     a timetable made with the load known: for each slice of it the fewest workers, all of which start in time; of
           several lengths of slices and allowances the cheapest that meets the target
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.planner.loads import ReplayLoad
from benchmarks.planner.rules import HpaRule, PlannerRule, Slot, Static, StepRule, Timetable
from weir.planner.observation import MAX_LENGTHS, ExpectedLoad, Pools
from weir.scheduling.limits import CoreLimits
from weir.sim.capacity import CapacitySpec, SimCapacity
from weir.sim.planning import PoolSizes
from weir.sim.results.metrics import Slos, summarize
from weir.sim.scaling import Controller, ScalingSpec
from weir.sim.simulator import simulate
from weir.sim.workloads.workload import SimRequest

TARGET = 0.95
ARMS = ("peak", "mean", "hpa", "step", "planner", "planner, no switch", "oracle")
_ORACLE_SLICES = (1 / 12, 1 / 24)
"""Of the load's time."""
_ORACLE_ALLOWANCES = (1.0, 1.2, 1.45, 1.8)
"""Times the rate of each slice; the first that meets the target ends the search, since larger ones cost more."""


@dataclass(frozen=True, slots=True)
class ArmOutcome:
    """Of one arm with one seed."""

    worker_s: float
    attainment: float
    p99_ttft_s: float
    num_changes: int
    """Workers that were ordered, or had another role, after the start."""


class Replayer:
    """One load with one seed. Every arm sees the same requests; all but `peak` and `oracle` begin as `mean` does."""

    def __init__(self, load: ReplayLoad, seed: int) -> None:
        self._load = load
        self._workload = load.make(seed)
        self._settings = load.settings()
        self._mean_pools = self._capacity().least_pools(self._load_of(self._workload.requests), TARGET, load.most)

    @property
    def num_requests(self) -> int:
        return len(self._workload.requests)

    @property
    def span_s(self) -> float:
        return self._workload.requests[-1].arrival_s

    def run(self, arm: str) -> ArmOutcome:
        """Of one of `ARMS`."""
        settings, pace = self._settings, self._load.pace
        if arm == "peak":
            return self._peak()
        if arm == "oracle":
            return self._oracle()
        capacity = self._capacity()
        makers: Mapping[str, Callable[[], Controller]] = {
            "mean": Static,
            "hpa": lambda: HpaRule(settings, capacity, pace),
            "step": lambda: StepRule(settings, capacity, pace),
            "planner": lambda: PlannerRule(settings, capacity),
            "planner, no switch": lambda: PlannerRule(dataclasses.replace(settings, may_switch=False), capacity),
        }
        return self._simulated(makers[arm], self._mean_pools)

    def _simulated(self, make: Callable[[], Controller], pools: Pools) -> ArmOutcome:
        load = self._load
        scaling = ScalingSpec(make, load.slo, load.start_s, load.switch_s, self._settings.tick_s)
        result = simulate(load.system(PoolSizes(*pools)), self._workload, scaling=scaling)
        summary = summarize(result, Slos(load.slo), warmup=0.0)
        return ArmOutcome(
            result.worker_s, summary.attainment, summary.p99_ttft_s, len(result.worker_spans) - sum(pools)
        )

    def _peak(self) -> ArmOutcome:
        """From the busiest slice's on, one more at a time of whichever role helps more."""
        slices = self._slots(_ORACLE_SLICES[-1], 1.0)
        pools = Pools(max(slot.pools.prefill for slot in slices), max(slot.pools.decode for slot in slices))
        best = self._simulated(Static, pools)
        while best.attainment < TARGET and pools != self._load.most:
            more = [pools.plus("prefill", 1), pools.plus("decode", 1)]
            allowed = [
                one for one in more if one.prefill <= self._load.most.prefill and one.decode <= self._load.most.decode
            ]
            tried = [(self._simulated(Static, one), one) for one in allowed]
            best, pools = max(tried, key=lambda found: found[0].attainment)
        return best

    def _oracle(self) -> ArmOutcome:
        found = [outcome for share in _ORACLE_SLICES for outcome in self._timetables(share)]
        enough = [outcome for outcome in found if outcome.attainment >= TARGET]
        if enough:
            return min(enough, key=lambda outcome: outcome.worker_s)
        return max(found, key=lambda outcome: outcome.attainment)

    def _timetables(self, share: float) -> Iterator[ArmOutcome]:
        """With more and more allowance, until one meets the target."""
        for allowance in _ORACLE_ALLOWANCES:
            slots = self._slots(share, allowance)
            outcome = self._simulated(
                lambda slots=slots: Timetable(slots, self._load.start_s, self._settings.tick_s),  # type: ignore[misc]
                slots[0].pools,
            )
            yield outcome
            if outcome.attainment >= TARGET:
                return

    def _slots(self, share: float, allowance: float) -> list[Slot]:
        """For each slice the fewest workers that hold its own requests, come evenly."""
        span_s, capacity = self.span_s * share, self._capacity()
        slots = []
        for number in range(round(1 / share)):
            from_s, to_s = number * span_s, (number + 1) * span_s
            requests = [one for one in self._workload.requests if from_s <= one.arrival_s < to_s]
            load = self._load_of(requests, span_s, allowance)
            pools = capacity.least_pools(load, TARGET, self._load.most) if requests else Pools(1, 1)
            slots.append(Slot(from_s, pools))
        return slots

    def _load_of(self, requests: Sequence[SimRequest], span_s: float = 0.0, factor: float = 1.0) -> ExpectedLoad:
        """`span_s` 0: the whole load's. Lengths spread over all of them."""
        stride = -(-len(requests) // MAX_LENGTHS) or 1
        picked = requests[::stride]
        prompts = tuple(one.num_prompt_tokens for one in picked)
        outputs = tuple(one.num_output_tokens for one in picked)
        return ExpectedLoad(factor * len(requests) / (span_s or self.span_s), prompts, outputs)

    def _capacity(self) -> SimCapacity:
        """Anew: what one arm has simulated is not given to another for nothing."""
        max_tokens = self._workload.requests[0].max_tokens
        return SimCapacity(CapacitySpec(self._load.system, self._load.slo, CoreLimits(), max_tokens=max_tokens))

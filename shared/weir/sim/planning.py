"""How many workers, and of which kind, meet an SLO: a search over pool sizes with the simulator as the judge.

1  the fewest workers: double them, then bisect; for each number the best split is found by climbing from the
   ratio of the work
2  the cheapest: trade workers of one pool for the other's, or for none, as long as that is cheaper and still meets
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from weir.core.cost import StepCost
from weir.policy.registry import PolicySpec
from weir.scheduling.limits import CoreLimits
from weir.sim.profile import CostProfile
from weir.sim.results.metrics import Estimate, Slos, Summary, mean_estimate, summarize
from weir.sim.results.report import finite
from weir.sim.simulator import DEFAULT_POLICY, simulate
from weir.sim.spec import LinkSpec, PoolSpec, SystemSpec
from weir.sim.workloads.traces import Replay, load_workload
from weir.sim.workloads.workload import Workload

_TYPICAL_BATCH = 32
"""Sequences that share a decode step's base cost, for the first guess of the ratio only."""


class PoolSizes(NamedTuple):
    """Workers of each kind: a split system, or workers that each serve alone."""

    num_prefill: int = 0
    num_decode: int = 0
    num_local: int = 0

    @property
    def num_workers(self) -> int:
        return sum(self)

    def __str__(self) -> str:
        if self.num_local:
            return f"{self.num_local} colocated"
        return f"{self.num_prefill} prefill + {self.num_decode} decode"


@dataclass(frozen=True, slots=True)
class Prices:
    """Of a worker of each kind, in any unit; equal ones count workers."""

    prefill: float = 1.0
    decode: float = 1.0
    local: float = 1.0

    def __post_init__(self) -> None:
        for name in ("prefill", "decode", "local"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"price of {name} {getattr(self, name)}: must be finite and over 0")

    def cost(self, pools: PoolSizes) -> float:
        return pools.num_prefill * self.prefill + pools.num_decode * self.decode + pools.num_local * self.local


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """`prefill_share`: of a split system's workers, where the climb begins."""

    target: float = 0.9
    """Share of the offered requests that must meet their SLO."""
    max_workers: int = 64
    prefill_share: float = 0.5
    prices: Prices = field(default_factory=Prices)

    def __post_init__(self) -> None:
        if not 0 < self.target <= 1:
            raise ValueError(f"target {self.target}: must be over 0 and at most 1")
        if not 1 <= self.max_workers <= 10_000:
            raise ValueError(f"max_workers {self.max_workers}: must be in [1, 10000]")
        if not 0 <= self.prefill_share <= 1:
            raise ValueError(f"prefill_share {self.prefill_share}: must be in [0, 1]")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One that was tried."""

    pools: PoolSizes
    cost: float
    attainment: Estimate
    is_enough: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """`candidates` in the order in which they were tried; `best` of each kind is None where none was enough."""

    candidates: tuple[Candidate, ...]
    best_split: Candidate | None
    best_local: Candidate | None

    @property
    def best(self) -> Candidate | None:
        """The cheaper of the two; the colocated one where they cost the same, for it moves no pages."""
        found = [candidate for candidate in (self.best_local, self.best_split) if candidate is not None]
        return min(found, key=lambda candidate: candidate.cost, default=None)


Judge = Callable[[PoolSizes], Estimate]
"""Attainment of the whole workload on these pools, over seeds."""


def search(judge: Judge, limits: PlanLimits) -> Plan:
    """Tries each pool sizes at most once. What is found is the cheapest if attainment never falls with more workers
    and has one peak over the splits of a number; noise of the order of the interval can hide a worker less."""
    tries = _Tries(judge, limits)
    best_local = _fewest(lambda num: tries.of(PoolSizes(num_local=num)), 1, limits)
    best_split = _fewest(lambda num: _best_split_of(num, tries, limits), 2, limits)
    if best_split is not None:
        best_split = _cheapest_from(best_split, tries, limits)
    return Plan(tuple(tries.made), best_split, best_local)


def search_upward(judge: Judge, target: float, least: PoolSizes, most: PoolSizes, max_steps: int) -> PoolSizes:
    """The first split system that is enough on the way up from `least`, each step the worker that helps more. Where no
    fewer than `least` can do, few tries find few workers. After `max_steps`, or at `most`, what was reached."""
    sizes = PoolSizes(min(least.num_prefill, most.num_prefill), min(least.num_decode, most.num_decode))
    mean, num_steps = judge(sizes).mean, 0
    while mean < target and num_steps < max_steps:
        num_steps += 1
        more = [PoolSizes(sizes.num_prefill + 1, sizes.num_decode), PoolSizes(sizes.num_prefill, sizes.num_decode + 1)]
        allowed = [one for one in more if one.num_prefill <= most.num_prefill and one.num_decode <= most.num_decode]
        if not allowed:
            break
        mean, sizes = max((judge(one).mean, one) for one in allowed)
    return sizes


class _Tries:
    """What was judged already."""

    def __init__(self, judge: Judge, limits: PlanLimits) -> None:
        self._judge = judge
        self._limits = limits
        self._by_pools: dict[PoolSizes, Candidate] = {}

    @property
    def made(self) -> Iterator[Candidate]:
        yield from self._by_pools.values()

    def of(self, pools: PoolSizes) -> Candidate:
        if pools not in self._by_pools:
            attainment = self._judge(pools)
            is_enough = attainment.mean >= self._limits.target
            cost = self._limits.prices.cost(pools)
            self._by_pools[pools] = Candidate(pools, cost, attainment, is_enough)
        return self._by_pools[pools]


def _fewest(best_of: Callable[[int], Candidate], at_least: int, limits: PlanLimits) -> Candidate | None:
    """Doubles until one is enough, then bisects."""
    num_missed, num = at_least - 1, at_least
    found = None
    while num <= limits.max_workers:
        candidate = best_of(num)
        if candidate.is_enough:
            found = candidate
            break
        if num == limits.max_workers:
            return None
        num_missed, num = num, min(2 * num, limits.max_workers)
    while found is not None and found.pools.num_workers - num_missed > 1:
        middle = (found.pools.num_workers + num_missed) // 2
        candidate = best_of(middle)
        if candidate.is_enough:
            found = candidate
        else:
            num_missed = middle
    return found


def _best_split_of(num: int, tries: _Tries, limits: PlanLimits) -> Candidate:
    """Climbs from the guessed ratio; ends at a peak, or as soon as one is enough."""

    def at(num_prefill: int) -> Candidate:
        return tries.of(PoolSizes(num_prefill, num - num_prefill))

    best = at(min(num - 1, max(1, round(num * limits.prefill_share))))
    for step in (1, -1):
        while not best.is_enough and 1 <= best.pools.num_prefill + step <= num - 1:
            neighbour = at(best.pools.num_prefill + step)
            if not neighbour.is_enough and neighbour.attainment.mean <= best.attainment.mean:
                break
            best = neighbour
    return best


def _cheapest_from(found: Candidate, tries: _Tries, limits: PlanLimits) -> Candidate:
    """Goes from one that is enough to a cheaper neighbour that is enough, while there is one."""
    while True:
        neighbours = sorted(
            (limits.prices.cost(pools), pools)
            for pools in _neighbours(found.pools)
            if limits.prices.cost(pools) < found.cost and pools.num_workers <= limits.max_workers
        )
        cheaper = next((pools for _, pools in neighbours if tries.of(pools).is_enough), None)
        if cheaper is None:
            return found
        found = tries.of(cheaper)


def _neighbours(pools: PoolSizes) -> Iterator[PoolSizes]:
    """One or two workers less of a pool, for up to two more of the other."""
    for less, more in ((1, 0), (1, 1), (1, 2), (2, 1)):
        for prefill, decode in ((-less, more), (more, -less)):
            moved = PoolSizes(pools.num_prefill + prefill, pools.num_decode + decode)
            if moved.num_prefill >= 1 and moved.num_decode >= 1:
                yield moved


@dataclass(frozen=True, slots=True)
class PlanJob:
    """The load, what it must meet, and the workers that may be bought. `decode_profile` None: as `profile`.

    `seeds` matter where arrivals are drawn or times spread; a trace with times of its own gives the same every time.
    """

    trace: Path
    replay: Replay
    slos: Slos
    profile: CostProfile
    decode_profile: CostProfile | None = None
    link: LinkSpec | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    limits: CoreLimits = field(default_factory=CoreLimits)
    policy: PolicySpec = DEFAULT_POLICY
    seeds: tuple[int, ...] = (0,)

    def system(self, pools: PoolSizes) -> SystemSpec:
        """Chunks as large as a step may be."""
        sizes = (self.max_num_seqs, self.max_num_batched_tokens, self.max_num_batched_tokens)
        if pools.num_local:
            return SystemSpec((PoolSpec("local", pools.num_local, self.profile, *sizes),))
        prefill = PoolSpec("prefill", pools.num_prefill, self.profile, *sizes)
        decode = PoolSpec("decode", pools.num_decode, self.decode_profile or self.profile, *sizes)
        return SystemSpec((prefill, decode), self.link)


def run_once(job: PlanJob, pools: PoolSizes, seed: int) -> Summary:
    """One simulation. Raises TraceError, ValueError."""
    workload = load_workload(job.trace, job.replay, seed)
    result = simulate(job.system(pools), workload, limits=job.limits, policy=job.policy)
    return summarize(result, job.slos)


@dataclass(slots=True)
class Planned:
    """A plan, and what each candidate's runs came to."""

    plan: Plan
    runs: dict[PoolSizes, Sequence[Summary]]

    def by_cost(self) -> list[Candidate]:
        """Cheapest first, the better one first among equals."""
        return sorted(self.plan.candidates, key=lambda c: (c.cost, -c.attainment.mean, c.pools))

    def mean(self, pools: PoolSizes, figure: str) -> float:
        """Over the runs that have the figure at all; NaN without one."""
        values = [value for run in self.runs[pools] if not math.isnan(value := run.as_dict()[figure])]
        return statistics.mean(values) if values else math.nan

    def as_dict(self) -> dict[str, Any]:
        best = self.plan.best
        return {
            "best": None if best is None else self._candidate(best),
            "candidates": [self._candidate(candidate) for candidate in self.by_cost()],
        }

    def _candidate(self, candidate: Candidate) -> dict[str, Any]:
        metrics = ("mean_ttft_s", "p99_ttft_s", "mean_tpot_s", "p99_worst_gap_s", "output_tokens_a_s")
        estimate = candidate.attainment
        return {
            **candidate.pools._asdict(),
            "cost": candidate.cost,
            "is_enough": candidate.is_enough,
            "attainment": finite({"mean": estimate.mean, "low": estimate.low, "high": estimate.high}),
            **finite({figure: self.mean(candidate.pools, figure) for figure in metrics}),
        }


def make_plan(
    job: PlanJob,
    limits: PlanLimits,
    executor: Executor | None = None,
    on_judged: Callable[[int, PoolSizes, float], None] | None = None,
) -> Planned:
    """Simulates until the cheapest pools are found; `executor` runs the seeds of one candidate side by side.

    Raises what `run_once` raises.
    """
    runs: dict[PoolSizes, Sequence[Summary]] = {}

    def judge(pools: PoolSizes) -> Estimate:
        many = map if executor is None else executor.map
        num = len(job.seeds)
        runs[pools] = list(many(run_once, [job] * num, [pools] * num, job.seeds))
        estimate = mean_estimate([run.attainment for run in runs[pools]])
        if on_judged is not None:
            on_judged(len(runs), pools, estimate.mean)
        return estimate

    return Planned(search(judge, limits), runs)


def guess_prefill_share(workload: Workload, prefill: StepCost, decode: StepCost, chunk_tokens: int) -> float:
    """Of the workers: as the work of the prompts is to that of the answers, in full decode batches."""
    num = len(workload.requests)
    num_prompt = max(1, round(sum(r.num_prompt_tokens for r in workload.requests) / num))
    num_output = sum(r.num_output_tokens for r in workload.requests) / num
    prefill_ms = prefill.prefill_ms(num_prompt, 0, chunk_tokens)
    context = num_prompt + num_output / 2
    step_ms = decode.base_ms / _TYPICAL_BATCH + decode.decode_sequence_ms + decode.context_token_ms * context
    return prefill_ms / (prefill_ms + num_output * step_ms)

"""How many workers, and of which kind, meet an SLO: a search over pool sizes with the simulator as the judge.

1  the fewest workers: double them, then bisect; for each number the best split is found by climbing from the
   ratio of the work
2  the cheapest: trade workers of one pool for the other's, or for none, as long as that is cheaper and still meets
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from weir.sim.results.stats import Estimate


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

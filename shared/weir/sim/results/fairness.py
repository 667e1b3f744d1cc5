"""How evenly tenants were served: the figure that VTC bounds, and what light tenants felt.

VTC (Sheng et al., OSDI 2024, arXiv 2401.00588): over any interval in which two tenants always have requests waiting,
their service, in units of price times tokens over weight, differs by at most 2 max(w_p L, w_q M).
"""

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from weir.sim.results.metrics import RequestOutcome, SimResult

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Gap:
    """The widest one found: between these tenants, in this time. All zero and empty if no two ever waited together."""

    service: float
    tenants: tuple[str, str]
    began_s: float
    ended_s: float


def widest_gap(result: SimResult) -> Gap:
    """Over all pairs of tenants and all stretches of time in which both had requests waiting the whole time.

    Read off the samples of `tenant_service`, so that what happens between two samples is seen at the next.
    """
    waiting = backlogged(result.outcomes)
    widest = Gap(0.0, ("", ""), 0.0, 0.0)
    for one, other in combinations(sorted(result.tenant_service), 2):
        for began_s, ended_s in common(waiting.get(one, ()), waiting.get(other, ())):
            one_share, other_share = (
                _samples(result.tenant_service[tenant], began_s, ended_s) for tenant in (one, other)
            )
            differences = _differences(one_share, other_share)
            service = max(differences) - min(differences)
            if service > widest.service:
                widest = Gap(service, (one, other), began_s, ended_s)
    return widest


def delivered_service(
    outcomes: Sequence[RequestOutcome], *, sample_s: float = 1.0, prompt_price: float = 1.0, output_price: float = 2.0
) -> dict[str, list[tuple[float, float]]]:
    """tenant -> (time, service so far) from what became of its requests, whatever the scheduler itself counted.

    A prompt counts when it is granted, less what was cached; output tokens evenly between the first and the last.
    """
    if not sample_s > 0:
        raise ValueError(f"sample_s {sample_s}: must be over 0")
    last_s = max((outcome.ended_s or 0.0 for outcome in outcomes), default=0.0)
    times = np.arange(int(np.ceil(last_s / sample_s)) + 1) * sample_s
    totals: dict[str, NDArray[np.float64]] = {}
    for outcome in outcomes:
        total = totals.setdefault(outcome.tenant, np.zeros(len(times)))
        if outcome.granted_s is not None:
            granted = np.searchsorted(times, outcome.granted_s)
            total[granted:] += prompt_price * (outcome.num_prompt_tokens - outcome.num_cached_tokens)
        if outcome.first_token_s is not None and outcome.last_token_s is not None:
            first, last = np.searchsorted(times, (outcome.first_token_s, outcome.last_token_s))
            service = output_price * outcome.num_output_tokens
            ends = (outcome.first_token_s, max(outcome.last_token_s, outcome.first_token_s + 1e-9))
            total[first:last] += np.interp(times[first:last], ends, (0.0, service))
            total[last:] += service
    return {tenant: list(zip(times.tolist(), total.tolist(), strict=True)) for tenant, total in sorted(totals.items())}


def backlogged(outcomes: Sequence[RequestOutcome]) -> dict[str, list[Interval]]:
    """When each tenant had a request between arrival and grant (or end, without a grant): disjoint, ascending."""
    by_tenant: dict[str, list[Interval]] = {}
    for outcome in outcomes:
        until_s = outcome.granted_s if outcome.granted_s is not None else outcome.ended_s
        if until_s is not None and until_s > outcome.arrival_s:
            by_tenant.setdefault(outcome.tenant, []).append((outcome.arrival_s, until_s))
    return {tenant: _united(intervals) for tenant, intervals in by_tenant.items()}


def common(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Where two ascending lists of disjoint intervals overlap."""
    found = []
    i = j = 0
    while i < len(one) and j < len(other):
        began_s, ended_s = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if began_s < ended_s:
            found.append((began_s, ended_s))
        i, j = (i + 1, j) if one[i][1] < other[j][1] else (i, j + 1)
    return found


def jain_index(amounts: Sequence[float]) -> float:
    """1: all alike; 1/n: one has everything (Jain, Chiu, Hawe 1984)."""
    total = sum(amounts)
    squares = sum(amount**2 for amount in amounts)
    return total**2 / (len(amounts) * squares) if squares else 1.0


def _united(intervals: Sequence[Interval]) -> list[Interval]:
    united: list[Interval] = []
    for began_s, ended_s in sorted(intervals):
        if united and began_s <= united[-1][1]:
            united[-1] = (united[-1][0], max(united[-1][1], ended_s))
        else:
            united.append((began_s, ended_s))
    return united


def _samples(service: Sequence[tuple[float, float]], began_s: float, ended_s: float) -> dict[float, float]:
    """time -> service, at the samples inside and at both ends; before the first sample it is 0."""
    times = [time_s for time_s, _ in service]

    def at(time_s: float) -> float:
        index = bisect.bisect_right(times, time_s) - 1
        return service[index][1] if index >= 0 else 0.0

    first, last = bisect.bisect_right(times, began_s), bisect.bisect_left(times, ended_s)
    return {
        began_s: at(began_s),
        **{times[i]: service[i][1] for i in range(first, last)},
        ended_s: at(ended_s),
    }


def _differences(one: Mapping[float, float], other: Mapping[float, float]) -> list[float]:
    """Of two step functions over the same time, wherever one of them steps."""
    times = sorted({*one, *other})
    one_now, other_now = one[times[0]], other[times[0]]
    differences = []
    for time_s in times:
        one_now, other_now = one.get(time_s, one_now), other.get(time_s, other_now)
        differences.append(one_now - other_now)
    return differences

"""The loads: public traces and a synthetic day, each with the workers, SLO and start time that it is replayed with.

Workers are 4 to 32 times as slow as an H100 with an 8B model and run 8 sequences at once, so that a few thousand
requests need four to fifteen of them, as large loads need of fast ones, and a run takes seconds. Each request is
moved by up to `_SPREAD_S`, by the seed: so five seeds are five draws around the same trace.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.traces import MOONCAKE, traces_folder
from weir.core.cost import StepCost
from weir.planner.observation import Pools
from weir.planner.settings import PlannerSettings
from weir.sim.planning import PoolSizes
from weir.sim.profile import CostProfile, load_profile
from weir.sim.results.metrics import Slo
from weir.sim.spec import LinkSpec, SystemSpec
from weir.sim.workloads.traces import read_lengths, read_trace
from weir.sim.workloads.workload import Lengths, Workload, draw, poisson

_PROFILE = "h100-llama3-8b"
_MAX_NUM_SEQS = 8
_LINK_GBYTES_PER_S = 25.0
_SPREAD_S = 5.0
_MOST = Pools(24, 24)
_DAY_FACTOR = 24.0
"""24 hours in one."""
_RAMP_FACTOR = 4.0
_AIBRIX, _AZURE, _CHAT = "aibrix_8min_up_and_down.jsonl.gz", "azure_2023_code.csv", "sharegpt8k_lengths_part_a.csv"


@dataclass(frozen=True, slots=True)
class ReplayLoad:
    """`pace`: by so much the rules' times are multiplied where the load's time is compressed, as far as a window has
    enough requests then."""

    name: str
    about: str
    slo: Slo
    start_s: float
    slower: float
    """Than the profile."""
    make: Callable[[int], Workload]
    pace: float = 1.0
    most: Pools = _MOST

    @property
    def switch_s(self) -> float:
        return 3.0 * self.pace

    def settings(self) -> PlannerSettings:
        """Of a planner for it."""
        paced = PlannerSettings(self.slo.ttft_s, self.slo.tpot_s, most=self.most).at_pace(self.pace)
        return dataclasses.replace(paced, start_s=self.start_s, switch_s=self.switch_s)

    def system(self, pools: PoolSizes) -> SystemSpec:
        """So many workers."""
        profile, link = slow_profile(self.slower), LinkSpec(_LINK_GBYTES_PER_S)
        return SystemSpec.split(pools.num_prefill, pools.num_decode, profile, link=link, max_num_seqs=_MAX_NUM_SEQS)


def slow_profile(slower: float) -> CostProfile:
    """Of one worker."""
    profile = load_profile(_PROFILE)
    step = {name: value * slower for name, value in dataclasses.asdict(profile.step).items()}
    return dataclasses.replace(profile, name=f"{_PROFILE} / {slower:g}", step=StepCost(**step))


def loads() -> tuple[ReplayLoad, ...]:
    """In the order of the table."""
    return (
        ReplayLoad(
            "aibrix up and down",
            "aibrix_8min_up_and_down, whole, as a fourth of 32 min; workers start in 60 s / 4",
            Slo(ttft_s=3.0, tpot_s=0.15),
            60.0 / _RAMP_FACTOR,
            16.0,
            lambda seed: _trace(_AIBRIX, seed),
            pace=1.0 / _RAMP_FACTOR,
        ),
        ReplayLoad(
            "azure code",
            "azure_2023_code, its first 20 min; workers start in 120 s",
            Slo(ttft_s=6.0, tpot_s=0.15),
            120.0,
            16.0,
            lambda seed: _trace(_AZURE, seed, until_s=1200.0),
        ),
        ReplayLoad(
            "mooncake conversation",
            "mooncake_conversation, its first 10 min, prefixes not shared; workers start in 120 s",
            Slo(ttft_s=20.0, tpot_s=0.15),
            120.0,
            4.0,
            lambda seed: _trace(MOONCAKE, seed, until_s=600.0),
        ),
        ReplayLoad(
            "day",
            "sine from 0.2 to 1 requests/s, half chat, half code, 24 h in 1 h; workers start in 300 s / 24",
            Slo(ttft_s=10.0, tpot_s=0.3),
            300.0 / _DAY_FACTOR,
            32.0,
            lambda seed: sine_load(_lengths_of_a_day(), 0.2, 1.0, 3600.0, seed),
            pace=0.5,
        ),
    )


def sine_load(lengths: Sequence[Lengths], low_a_s: float, high_a_s: float, period_s: float, seed: int) -> Workload:
    """One period from its low on: a Poisson process of changing rate, by thinning (Lewis & Shedler, 1979)."""
    source = np.random.default_rng(seed)
    times = poisson(high_a_s, math.ceil(high_a_s * period_s * 1.2) + 100, source)
    times = times[times < period_s]
    middle, half = (high_a_s + low_a_s) / 2, (high_a_s - low_a_s) / 2
    rates = middle - half * np.cos(2 * math.pi * times / period_s)
    times = times[source.uniform(0.0, high_a_s, len(times)) < rates]
    return draw(lengths, times, source, name="day")


def _lengths_of_a_day() -> list[Lengths]:
    folder = traces_folder(_CHAT, _AZURE)
    chat, code = read_lengths(folder / _CHAT), read_lengths(folder / _AZURE)
    num = min(len(chat), len(code))
    return [*chat[:num], *code[:num]]


def _trace(name: str, seed: int, until_s: float = math.inf) -> Workload:
    workload = read_trace(traces_folder(name) / name, seed=seed)
    requests = [request for request in workload.requests if request.arrival_s < until_s]
    shifts = np.random.default_rng(seed).uniform(0.0, _SPREAD_S, len(requests)).tolist()
    moved = [
        dataclasses.replace(one, arrival_s=one.arrival_s + shift_s, prefix_blocks=())
        for one, shift_s in zip(requests, shifts, strict=True)
    ]
    moved.sort(key=lambda request: (request.arrival_s, request.request_id))
    return dataclasses.replace(workload, requests=tuple(moved))

"""Where prompts go when they begin alike: by chance, by load, to the longest prefix, to the soonest first token."""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache, partial

from benchmarks.sim.experiment import Case, Check, Experiment, Figure, Results, Size
from benchmarks.sim.experiments._size_based import open_limits
from benchmarks.sim.report import show
from benchmarks.traces import MOONCAKE, traces_folder
from weir.core.cost import StepCost
from weir.scheduling.limits import PlacingLimits, RouterName
from weir.sim.profile import load_profile
from weir.sim.results.metrics import summarize
from weir.sim.simulator import simulate
from weir.sim.spec import SystemSpec
from weir.sim.workloads.traces import read_trace
from weir.sim.workloads.workload import Workload

_NUM_REQUESTS = 12_031
"""The whole trace: conversations come back over the hour, so a stretch of it finds less in caches that begin empty."""
_UNIT_TOKENS = 8
"""Everything is counted in units of eight tokens: the same system, with an eighth of the pages to keep track of."""
_BLOCK_UNITS = 512 // _UNIT_TOKENS
_NUM_BLOCKS = 3000
_PAGE_UNITS = 16
_COST = StepCost(14.0, 0.09 * _UNIT_TOKENS, 8e-7 * _UNIT_TOKENS**2, 0.0, 0.0)
_NUM_INSTANCES = 16
_RANDOM, _LEAST_LOAD, _LONGEST, _ESTIMATED = "random", "least-load", "longest-prefix", "estimated-ttft"
_ARMS: tuple[RouterName, ...] = ("random", "least-load", "longest-prefix", "estimated-ttft")
_POINT = "conversation"


@lru_cache(maxsize=2)
def _trace(seed: int) -> Workload:
    return read_trace(traces_folder() / MOONCAKE, seed=seed)


def _workload(num: int, seed: int) -> Workload:
    """`num` requests in a row, from another place with each seed (the whole, with other jitter); first tokens alone."""
    whole = _trace(seed)
    start = seed * ((len(whole.requests) - num) // 5)
    begin_s = whole.requests[start].arrival_s
    requests = tuple(
        dataclasses.replace(
            request,
            arrival_s=request.arrival_s - begin_s,
            num_prompt_tokens=max(1, request.num_prompt_tokens // _UNIT_TOKENS),
            num_output_tokens=1,
            max_tokens=1,
        )
        for request in whole.requests[start : start + num]
    )
    return Workload(whole.name, requests, _BLOCK_UNITS)


def _run(router: RouterName, num: int, num_instances: int, seed: int) -> Mapping[str, float]:
    placing = PlacingLimits(router=router, seed=seed)
    limits = dataclasses.replace(open_limits(max_prefill_tokens=10**6), max_prefills=10_000, placing=placing)
    profile = dataclasses.replace(load_profile("a100-llama3-8b"), step=_COST)
    spec = SystemSpec.colocated(
        num_instances,
        profile,
        max_num_seqs=10_000,
        max_num_batched_tokens=8192 // _UNIT_TOKENS,
        chunk_tokens=8192 // _UNIT_TOKENS,
        num_pages=_NUM_BLOCKS * _BLOCK_UNITS // _PAGE_UNITS,
    )
    result = simulate(spec, _workload(num, seed), limits=limits)
    summary = summarize(result)
    loads = Counter(outcome.prefill_worker_id for outcome in result.outcomes)
    return {
        "cached_share": summary.cached_share,
        "mean_ttft_s": summary.mean_ttft_s,
        "p99_ttft_s": summary.p99_ttft_s,
        "load_max_over_mean": max(loads.values()) * num_instances / len(result.outcomes),
    }


def _cases(size: Size) -> list[Case]:
    arms: tuple[RouterName, ...] = _ARMS if size is Size.FULL else ("random", "estimated-ttft")
    num, num_instances = (_NUM_REQUESTS, _NUM_INSTANCES) if size is Size.FULL else (250, 8)
    return [Case(arm, partial(_run, arm, num, num_instances), _POINT) for arm in arms]


def _findings(results: Results) -> list[str]:
    if _LONGEST not in results.arms():
        return []
    herd = results.ratio("mean_ttft_s", _LONGEST, _ESTIMATED, _POINT)
    load = results.estimate("load_max_over_mean", _LONGEST, _POINT)
    return [
        f"Plain longest prefix herds: the fullest instance gets {show(load)} times the mean, and the mean TTFT is "
        f"{show(herd)} times that of the estimate."
    ]


_FULL_ONLY = (Size.FULL,)

EXPERIMENT = Experiment(
    name="prefix-routing",
    title="Placement with a view of cached prefixes",
    claim=(
        "Placing prompts where their first token is estimated to come soonest, cached prefixes counted, beats placing "
        "by load, and does not herd as placing by the longest prefix does (Mooncake, FAST 2025, arXiv 2407.00079)."
    ),
    compared=(
        f"Mooncake's conversation trace, all {_NUM_REQUESTS:,} requests of its hour, times jittered inside its 3 s "
        f"ticks anew with each seed; {_NUM_INSTANCES} instances that prefill (14 ms a step, 0.09 ms a token, "
        f"8e-7 ms a pair of tokens), {_NUM_BLOCKS:,} cached blocks of 512 tokens each, least recently used evicted; "
        f"first tokens alone. Counted in units of {_UNIT_TOKENS} tokens. The router knows what instances say that they "
        "have cached, every tenth of a second, and what it has just placed."
    ),
    cases=_cases,
    figures=(
        Figure("cached_share", "prompt tokens cached", 3),
        Figure("mean_ttft_s", "TTFT mean, s", 2),
        Figure("p99_ttft_s", "TTFT p99, s", 1),
        Figure("load_max_over_mean", "requests of the fullest over the mean", 2),
    ),
    checks=(
        Check(
            "token hits over random's are at least 2.5 times",
            lambda results: results.ratio("cached_share", _ESTIMATED, _RANDOM, _POINT),
            at_least=2.5,
            sizes=_FULL_ONLY,
        ),
        Check(
            "token hits are more than random's",
            lambda results: results.ratio("cached_share", _ESTIMATED, _RANDOM, _POINT),
            at_least=1.3,
        ),
        Check(
            "mean TTFT over least-load's is at most 0.85",
            lambda results: results.ratio("mean_ttft_s", _ESTIMATED, _LEAST_LOAD, _POINT),
            at_most=0.85,
            sizes=_FULL_ONLY,
        ),
        Check(
            "the fullest instance gets less than 5 times the mean",
            lambda results: results.estimate("load_max_over_mean", _ESTIMATED, _POINT),
            at_most=5.0,
        ),
    ),
    findings=_findings,
    traces=(MOONCAKE,),
)

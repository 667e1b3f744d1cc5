"""Running sequences that go on at another host, as decode workers fill unevenly: beside sequences that stay."""

import dataclasses
from collections.abc import Mapping
from functools import partial

import numpy as np

from benchmarks.sim.experiment import Case, Check, Experiment, Figure, Results, Size
from benchmarks.sim.experiments._size_based import SHAREGPT, lengths_of, open_limits
from benchmarks.sim.report import show
from benchmarks.traces import AZURE, traces_folder
from weir.scheduling.limits import MemoryFitName, PlacingLimits
from weir.sim.profile import load_profile
from weir.sim.results.metrics import summarize
from weir.sim.simulator import simulate
from weir.sim.spec import FailureSpec, LinkSpec, PoolSpec, SystemSpec
from weir.sim.workloads.traces import Replay, load_workload
from weir.sim.workloads.workload import Lengths, Workload, draw, poisson, with_values

_PROFILE = "h100-llama3-8b"
_NUM_HOSTS = 3
_GBYTES_A_S = 3.125
"""A link of 25 Gb/s."""
_BEGINS_AT_S = 4.0
"""By then the scheduler knows that the late host is not there."""
_JOINS_AT_S = 12.0
_STAYS, _REBALANCED = "stays", "rebalanced"


@dataclasses.dataclass(frozen=True, slots=True)
class _Point:
    """`large`: one request in so many has a prompt of `_LARGE_TOKENS`."""

    name: str
    trace: str
    rate_a_s: float
    num_pages: int
    memory_fit: MemoryFitName = "conservative"
    max_tokens: int = 1024
    is_late: bool = False
    large: int = 0


_LARGE_TOKENS = 9000
_EVEN = _Point("ShareGPT, even", SHAREGPT, 8.0, 4000)
_LATE = _Point("ShareGPT, a host joins late", SHAREGPT, 8.0, 4000, is_late=True)
_TIGHT = _Point("ShareGPT, what fits now is admitted", SHAREGPT, 8.0, 800, "aggressive")
_LARGE = _Point("ShareGPT and large prompts", SHAREGPT, 6.0, 1500, large=20, max_tokens=512)
_CODE = _Point("Azure code, a host joins late", AZURE, 8.0, 4000, is_late=True, max_tokens=2000)
_POINTS = (_EVEN, _LATE, _TIGHT, _LARGE, _CODE)


def _workload(point: _Point, num: int, seed: int) -> Workload:
    workload = _drawn(point, num, seed)
    times = [_BEGINS_AT_S + request.arrival_s for request in workload.requests]
    return with_values(workload, arrival_s=times)


def _drawn(point: _Point, num: int, seed: int) -> Workload:
    source = np.random.default_rng(seed)
    if point.trace == AZURE:
        replay = Replay(num, point.rate_a_s, "poisson", max_tokens=point.max_tokens)
        return load_workload(traces_folder() / AZURE, replay, seed)
    lengths = [
        Lengths(one.num_prompt_tokens, min(one.num_output_tokens, point.max_tokens)) for one in lengths_of(point.trace)
    ]
    times = poisson(point.rate_a_s, num, source)
    drawn = draw(lengths, times, source, name="r", max_tokens=point.max_tokens)
    if not point.large:
        return drawn
    requests = tuple(
        dataclasses.replace(one, num_prompt_tokens=_LARGE_TOKENS) if i % point.large == point.large - 1 else one
        for i, one in enumerate(drawn.requests)
    )
    return dataclasses.replace(drawn, requests=requests)


def _system(point: _Point) -> SystemSpec:
    """Workers that prefill and decode, one a host; the last comes late, or is there from the start."""
    profile = load_profile(_PROFILE)
    pools = tuple(
        PoolSpec("decode", 1, profile, num_pages=point.num_pages, serves_locally=True, host=f"h{number}")
        for number in range(_NUM_HOSTS)
    )
    late = (FailureSpec(f"decode-{_NUM_HOSTS - 1}", 0.0, _JOINS_AT_S),) if point.is_late else ()
    return SystemSpec(pools, host_link=LinkSpec(_GBYTES_A_S, 0.1), failures=late)


def _run(point: _Point, arm: str, num: int, seed: int) -> Mapping[str, float]:
    placing = PlacingLimits(memory_fit=point.memory_fit, seed=seed)
    limits = dataclasses.replace(open_limits(), placing=placing, rebalances=arm == _REBALANCED)
    result = simulate(_system(point), _workload(point, num, seed), limits=limits)
    summary, counters = summarize(result), result.counters
    large = [o for o in result.outcomes if o.num_prompt_tokens == _LARGE_TOKENS and o.first_token_s is not None]
    waits_s = [o.first_token_s - o.arrival_s for o in large if o.first_token_s is not None]
    return {
        "mean_ttft_s": summary.mean_ttft_s,
        "p99_ttft_s": summary.p99_ttft_s,
        "large_ttft_s": float(np.mean(waits_s)) if waits_s else 0.0,
        "mean_tpot_ms": 1000 * summary.mean_tpot_s,
        "p99_tpot_ms": 1000 * summary.p99_tpot_s,
        "p99_gap_ms": 1000 * summary.p99_worst_gap_s,
        "preemptions": counters.get("preemptions", 0.0),
        "moved": counters["migrations_moved"],
        "abandoned": counters["migrations_abandoned"],
    }


def _cases(size: Size) -> list[Case]:
    points, num = (_POINTS, 120) if size is Size.FULL else ((_LATE,), 100)
    return [Case(arm, partial(_run, point, arm, num), point.name) for point in points for arm in (_STAYS, _REBALANCED)]


def _findings(results: Results) -> list[str]:
    sentences = []
    for point in results.points():
        ratios = ", ".join(
            f"{label} {show(results.ratio(name, _REBALANCED, _STAYS, point))}"
            for name, label in (("p99_ttft_s", "p99 TTFT"), ("mean_tpot_ms", "mean TPOT"), ("p99_tpot_ms", "p99 TPOT"))
        )
        more = results.difference("preemptions", _REBALANCED, _STAYS, point)
        moved = results.estimate("moved", _REBALANCED, point)
        sentences.append(f"{point}: {show(moved)} moves; over what stays: {ratios}; preemptions {show(more)} more.")
    return sentences


_FULL_ONLY = (Size.FULL,)

EXPERIMENT = Experiment(
    name="rebalancing",
    title="Rebalancing of decoding sequences by freeness",
    claim=(
        "Running sequences that migrate from crowded workers to free ones shorten tails and lessen preemptions "
        "(Llumnix, OSDI 2024, arXiv 2406.03243: p99 TTFT up to 15 times beside dispatch to the least loaded instance)."
    ),
    compared=(
        f"{_NUM_HOSTS} hosts of one {_PROFILE} each that prefills and decodes, links of 25 Gb/s, fcfs; one scheduler "
        f"with one queue places each request when it has room, which Llumnix's baselines do not. 120 requests: "
        f"ShareGPT lengths at 8/s, 64,000 tokens of memory a host; the same with one host that joins after "
        f"{_JOINS_AT_S:g} s; with 12,800 tokens, where whatever fits now is admitted; at 6/s, every "
        f"20th prompt of {_LARGE_TOKENS:,} tokens, 24,000 tokens a host; "
        "and Azure's code trace at 8/s with the late host. A move takes its bytes over the link, then what is behind "
        "the last full page is computed again."
    ),
    cases=_cases,
    figures=(
        Figure("mean_ttft_s", "TTFT mean, s", 3),
        Figure("p99_ttft_s", "TTFT p99, s", 3),
        Figure("large_ttft_s", "TTFT of large prompts, mean, s", 3),
        Figure("mean_tpot_ms", "TPOT mean, ms", 3),
        Figure("p99_tpot_ms", "TPOT p99, ms", 3),
        Figure("p99_gap_ms", "worst gap p99, ms", 3),
        Figure("preemptions", "preemptions", 3),
        Figure("moved", "moved", 3),
        Figure("abandoned", "given up", 2),
    ),
    checks=(
        Check(
            f"p99 TTFT is not longer ({_LATE.name})",
            lambda results: results.ratio("p99_ttft_s", _REBALANCED, _STAYS, _LATE.name),
            at_most=1.05,
        ),
        Check(
            f"mean TPOT is not longer ({_LATE.name})",
            lambda results: results.ratio("mean_tpot_ms", _REBALANCED, _STAYS, _LATE.name),
            at_most=1.02,
        ),
        Check(
            f"p99 TTFT is shorter ({_LARGE.name})",
            lambda results: results.ratio("p99_ttft_s", _REBALANCED, _STAYS, _LARGE.name),
            at_most=0.95,
            sizes=_FULL_ONLY,
        ),
    ),
    findings=_findings,
    traces=(SHAREGPT,),
    full_traces=(AZURE,),
)

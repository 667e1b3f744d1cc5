"""How many tokens a step may hold: the longest gap between tokens against the time to the first."""

from collections.abc import Mapping
from functools import partial

import numpy as np

from benchmarks.sim.experiment import Case, Check, Experiment, Figure, Results, Size, SweepPlot
from benchmarks.sim.experiments._size_based import SHAREGPT, figures, lengths_of, open_limits
from benchmarks.sim.report import show
from weir.policy.registry import PolicySpec
from weir.sim.profile import load_profile
from weir.sim.results.metrics import Estimate, gap_percentile_s
from weir.sim.simulator import simulate
from weir.sim.spec import SystemSpec
from weir.sim.workloads.workload import draw, poisson

_PROFILE = "h100-llama3-8b"
_RATE_A_S = 5.0
_CHUNKS = (256, 512, 1024, 2048, 4096, 8192)
_CHUNKED, _UNCHUNKED, _PREFILL_FIRST, _HYBRID = "chunked", "unchunked", "prefill-first", "hybrid"
_WHOLE = 16_384
"""A step that holds two of the longest prompts."""


def _run(arm: str, num_tokens: int, num: int, seed: int) -> Mapping[str, float]:
    source = np.random.default_rng(seed)
    workload = draw(lengths_of(SHAREGPT), poisson(_RATE_A_S, num, source), source, name="r")
    spec = SystemSpec.colocated(1, load_profile(_PROFILE), max_num_batched_tokens=num_tokens, chunk_tokens=num_tokens)
    params = {"default_itl_s": 0.05} if arm == _HYBRID else {}
    policy = PolicySpec("fcfs" if arm == _CHUNKED else arm, params)
    limits = open_limits(max_prefill_tokens=2 * num_tokens)
    result = simulate(spec, workload, limits=limits, policy=policy)
    values = figures(result)
    return values | {
        "p99_itl_ms": 1000 * gap_percentile_s(result, 99),
        "p50_itl_ms": 1000 * gap_percentile_s(result, 50),
        "p99_worst_gap_ms": 1000 * values["p99_worst_gap_s"],
    }


def _cases(size: Size) -> list[Case]:
    is_small = size is Size.SMALL
    num = 150 if is_small else 600

    chunks = (2048,) if is_small else _CHUNKS
    whole = (_UNCHUNKED,) if is_small else (_UNCHUNKED, _PREFILL_FIRST, _HYBRID)
    return [
        *(Case(_CHUNKED, partial(_run, _CHUNKED, chunk, num), str(chunk), float(chunk)) for chunk in chunks),
        *(Case(arm, partial(_run, arm, _WHOLE, num), str(_WHOLE)) for arm in whole),
    ]


def _findings(results: Results) -> list[str]:
    sentences = []
    for arm in results.arms():
        for point in results.points(arm):
            gap, ttft = results.estimate("p99_itl_ms", arm, point), results.estimate("mean_ttft_s", arm, point)
            sentences.append(f"{arm}, {point} tokens: p99 gap {show(gap)} ms, mean TTFT {show(ttft)} s.")
    return sentences


def _over_unchunked(results: Results, figure: str) -> Estimate:
    """At 2,048 tokens."""
    return results.ratio(figure, _CHUNKED, _UNCHUNKED, "2048", base_point=str(_WHOLE))


EXPERIMENT = Experiment(
    name="chunk-size",
    title="Chunk size against the gap between tokens",
    claim=(
        "Chunked prompts beside decodes (Sarathi-Serve, arXiv 2403.02310) shorten the worst gaps several times for a "
        "somewhat later first token; too small a chunk saturates the system."
    ),
    compared=(
        f"One colocated {_PROFILE}, ShareGPT lengths, 600 Poisson arrivals at {_RATE_A_S:g} requests/s. Baselines: "
        f"prompts whole beside decodes and prompts before decodes, in steps of up to {_WHOLE} tokens; `hybrid`: "
        "Niyama's chunk that follows the decodes' slack, for gaps of 50 ms."
    ),
    cases=_cases,
    figures=(
        Figure("p50_itl_ms", "gap p50, ms", 0),
        Figure("p99_itl_ms", "p99, ms", 0),
        Figure("p99_worst_gap_ms", "p99 of worst, ms", 0),
        Figure("mean_ttft_s", "TTFT mean, s", 3),
        Figure("p99_ttft_s", "p99, s", 2),
    ),
    checks=(
        Check(
            "p99 of the worst gap at 2048 tokens at most a third of that without chunks",
            lambda results: _over_unchunked(results, "p99_worst_gap_ms"),
            at_most=1 / 3,
        ),
        Check(
            "mean TTFT at 2048 tokens at most 1.6 times that without chunks",
            lambda results: _over_unchunked(results, "mean_ttft_s"),
            at_most=1.6,
        ),
    ),
    findings=_findings,
    plots=(SweepPlot("p99_itl_ms", "tokens a step"), SweepPlot("mean_ttft_s", "tokens a step", is_log=True)),
    traces=(SHAREGPT,),
)

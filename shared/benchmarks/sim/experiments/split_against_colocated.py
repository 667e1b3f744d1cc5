"""Separate prefill and decode workers against workers that do both, at equal numbers of GPUs."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from benchmarks.sim.experiment import Case, Check, Experiment, Figure, Results, Size
from benchmarks.sim.report import show
from benchmarks.traces import traces_folder
from weir.sim.profile import load_profile
from weir.sim.results.metrics import SimResult, Slo, Slos, mean_estimate, summarize
from weir.sim.simulator import simulate
from weir.sim.spec import LinkSpec, SystemSpec
from weir.sim.workloads.traces import read_lengths
from weir.sim.workloads.workload import draw, poisson

_NUM_GPUS = 4
_PROFILE = "h100-llama3-8b"
_LINKS = {"25 GB/s": LinkSpec(gbytes_per_s=25.0), "300 GB/s": LinkSpec(gbytes_per_s=300.0)}
"""One 200 Gb/s network card a GPU; about what NVLink does in one direction."""
_TRACES = {"code": "azure_2023_code.csv", "chat": "sharegpt8k_lengths_part_a.csv"}
_SPLITS = ("1P3D, 25 GB/s", "2P2D, 25 GB/s", "3P1D, 25 GB/s", "2P2D, 300 GB/s", "3P1D, 300 GB/s")
_TARGET_ATTAINMENT = 0.9
"""Of the offered requests, as DistServe defines goodput."""
_COLOCATED = {f"colocated, {tokens} a step": tokens for tokens in (512, 1024, 2048)}
_SLOS = {
    f"TTFT {ttft_ms} ms, gap {gap_ms} ms": Slo(ttft_s=ttft_ms / 1e3, worst_gap_s=gap_ms / 1e3)
    for ttft_ms in (400, 2000)
    for gap_ms in (25, 50, 100)
}
_CHECKED_CHUNKS, _CHECKED = "colocated, 512 a step", "2P2D, 300 GB/s"
_STEP = 1.15
"""Between the rates that are tried; capacity is interpolated between two of them."""
_LOWEST_A_S = {"code": 6.0, "chat": 3.0}
_STRIDE = 4
_MAX_STEPS = 32


def _system(arm: str) -> SystemSpec:
    profile = load_profile(_PROFILE)
    if arm in _COLOCATED:
        tokens = _COLOCATED[arm]
        return SystemSpec.colocated(_NUM_GPUS, profile, max_num_batched_tokens=tokens, chunk_tokens=tokens)
    return SystemSpec.split(int(arm[0]), int(arm[2]), profile, link=_LINKS[arm.partition(", ")[2]])


class _Sweep:
    """Runs of one system, seed and trace at rates on a grid, each made once and judged by every SLO."""

    def __init__(self, simulate_at: Callable[[float], SimResult], lowest_a_s: float) -> None:
        self._simulate_at = simulate_at
        self._lowest_a_s = lowest_a_s
        self._shares: dict[int, dict[str, float]] = {}

    def capacity_a_s(self, slo: str) -> float:
        """In strides upward, then by bisection; 0 if the lowest rate misses."""
        if self._share(0, slo) < _TARGET_ATTAINMENT:
            return 0.0
        met, missed = 0, _STRIDE
        while self._share(missed, slo) >= _TARGET_ATTAINMENT:
            met, missed = missed, missed + _STRIDE
            if missed > _MAX_STEPS:
                raise ValueError(f"{slo}: {self._rate(met):.0f} requests/s are still served; raise _MAX_STEPS")
        while missed - met > 1:
            middle = (met + missed) // 2
            if self._share(middle, slo) >= _TARGET_ATTAINMENT:
                met = middle
            else:
                missed = middle
        # Where the line between the two points crosses the target.
        low, low_share = self._rate(met), self._share(met, slo)
        high, high_share = self._rate(missed), self._share(missed, slo)
        return low + (high - low) * (low_share - _TARGET_ATTAINMENT) / (low_share - high_share)

    def _rate(self, step: int) -> float:
        return float(self._lowest_a_s * _STEP**step)

    def _share(self, step: int, slo: str) -> float:
        if step not in self._shares:
            result = self._simulate_at(self._rate(step))
            self._shares[step] = {name: summarize(result, Slos(bounds)).attainment for name, bounds in _SLOS.items()}
        return self._shares[step][slo]


def _run(arm: str, trace: str, duration_s: float, seed: int) -> Mapping[str, float]:
    lengths = read_lengths(traces_folder() / _TRACES[trace])
    system = _system(arm)

    def simulate_at(rate_a_s: float) -> SimResult:
        source = np.random.default_rng(seed)
        arrivals_s = poisson(rate_a_s, round(rate_a_s * duration_s), source)
        workload = draw(lengths, arrivals_s, source, name=trace)
        return simulate(system, workload)

    sweep = _Sweep(simulate_at, _LOWEST_A_S[trace])
    return {slo: sweep.capacity_a_s(slo) / _NUM_GPUS for slo in _SLOS}


def _cases(size: Size) -> list[Case]:
    arms = (*_COLOCATED, *_SPLITS) if size is Size.FULL else ("colocated, 2048 a step", _CHECKED_CHUNKS, _CHECKED)
    traces = tuple(_TRACES) if size is Size.FULL else ("code",)
    duration_s = 20.0 if size is Size.FULL else 2.0
    return [Case(arm, partial(_run, arm, trace, duration_s), trace) for trace in traces for arm in arms]


def _best(results: Results, arms: Sequence[str], slo: str, point: str) -> str:
    present = [arm for arm in results.arms() if arm in arms]
    return max(present, key=lambda arm: results.estimate(slo, arm, point).mean)


def _findings(results: Results) -> list[str]:
    sentences = []
    for point in results.points():
        for slo in _SLOS:
            split, colocated = _best(results, _SPLITS, slo, point), _best(results, tuple(_COLOCATED), slo, point)
            one, other = results.values(slo, split, point), results.values(slo, colocated, point)
            if not all(other):
                verdict = "neither can" if not any(one) else "only the split can"
                sentences.append(f"{point}, {slo}: {verdict} ({split} {show(mean_estimate(one))}).")
                continue
            ratio = results.ratio(slo, split, colocated, point)
            word = "wins" if ratio.low > 1 else "loses" if ratio.high < 1 else "makes no clear difference"
            sentences.append(
                f"{point}, {slo}: splitting {word}: best split {split} has {show(ratio)} of the goodput of "
                f"the best colocated ({colocated.removeprefix('colocated, ')})."
            )
    return sentences


EXPERIMENT = Experiment(
    name="split-against-colocated",
    title="Split against colocated workers at equal GPUs",
    claim=(
        "Whether separate pools serve more a GPU (DistServe, arXiv 2401.09670) depends on the SLO and on the ratio of "
        "prefill to decode workers; no sign is claimed beforehand, and where splitting loses is reported."
    ),
    compared=(
        f"{_NUM_GPUS} GPUs ({_PROFILE}): prefill and decode workers in every ratio, whose links ({', '.join(_LINKS)}) "
        "start to move a prompt's pages when it is prefilled; and colocated workers with chunked prefill at three "
        "sizes of a step. Lengths of Azure's code trace (long prompts, a dozen tokens of output) and of ShareGPT "
        "chats, 20 s of Poisson arrivals. Figures: requests/s a GPU at which 90 % of the offered requests meet TTFT "
        "and worst gap. The best of each kind is chosen by its mean over the same seeds, which flatters the kind with "
        "more arms."
    ),
    cases=_cases,
    figures=tuple(Figure(slo, slo) for slo in _SLOS),
    checks=(
        Check(
            "code, gap 50 ms: colocated in steps of 512 tokens over steps of 2048",
            lambda results: results.ratio("TTFT 400 ms, gap 50 ms", _CHECKED_CHUNKS, "colocated, 2048 a step", "code"),
            at_least=1.0,
        ),
        Check(
            f"code, gap 50 ms: {_CHECKED} over colocated in steps of 2048",
            lambda results: results.ratio("TTFT 400 ms, gap 50 ms", _CHECKED, "colocated, 2048 a step", "code"),
            at_least=1.0,
        ),
    ),
    findings=_findings,
    traces=tuple(_TRACES.values()),
)

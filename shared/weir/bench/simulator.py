"""`weir bench simulator`: how many requests a minute the simulator gets through, step by step and with fast-forward.

The same load goes through both, in turns, and what comes out must be equal to the bit. The figures are processor time
of this process, so that what else runs on the machine does not count. Garbage collection is on, as in `weir simulate`.
"""

import gc
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.table import Table

from weir.bench.report import run_and_print
from weir.sim.profile import load_profile
from weir.sim.results.metrics import SimResult
from weir.sim.simulator import simulate
from weir.sim.spec import LinkSpec, SystemSpec
from weir.sim.workloads.traces import read_lengths
from weir.sim.workloads.workload import Lengths, Workload, draw, poisson

DATA_VARIABLE = "WEIR_TEST_DATA"
"""The folder whose folder `traces` has trace files."""
_PROFILE = "h100-llama3-8b"
_SECONDS_A_MINUTE = 60.0
_NUM_GENERATED = 4000
_GENERATED_SEED = 0


@dataclass(frozen=True, slots=True)
class Load:
    """`rate_a_s`: about two thirds of what four workers can do. Means in tokens, of lengths that are generated where
    the trace is missing."""

    trace: str
    rate_a_s: float
    mean_prompt_tokens: int
    mean_output_tokens: int


LOADS = {
    "arena": Load("vtc_arena_tenants_part_a.csv", 160.0, 143, 239),
    "code": Load("azure_2023_code.csv", 32.0, 2048, 28),
    "chat": Load("sharegpt8k_lengths_part_a.csv", 16.0, 2343, 439),
}


@dataclass(frozen=True, slots=True)
class SimulatorBenchConfig:
    """`loads`: names of LOADS."""

    loads: tuple[str, ...] = tuple(LOADS)
    num_requests: int = 2000
    rounds: int = 3
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Speed:
    """Requests a minute of processor time, one figure a round."""

    load: str
    source: str
    system: str
    exact_a_min: tuple[float, ...]
    fast_a_min: tuple[float, ...]


class UnequalResults(Exception):
    """Fast-forward came to something else: a defect of the simulator."""


def systems() -> dict[str, SystemSpec]:
    """Four workers each."""
    profile = load_profile(_PROFILE)
    return {
        "4 colocated": SystemSpec.colocated(4, profile),
        "2 prefill + 2 decode, 25 GB/s": SystemSpec.split(2, 2, profile, link=LinkSpec(gbytes_per_s=25.0)),
    }


def lengths_of(load: Load) -> tuple[str, list[Lengths]]:
    """Their source, and what is drawn from: the trace's, or exponential ones with its means."""
    root = os.environ.get(DATA_VARIABLE)
    path = Path(root or "") / "traces" / load.trace
    if root and path.is_file():
        return load.trace, read_lengths(path)
    source = np.random.default_rng(_GENERATED_SEED)
    means = (load.mean_prompt_tokens, load.mean_output_tokens)
    prompts, outputs = (np.ceil(source.exponential(mean, _NUM_GENERATED)).astype(int).tolist() for mean in means)
    return "generated", [Lengths(max(1, p), max(1, o)) for p, o in zip(prompts, outputs, strict=True)]


def measure(name: str, system: str, config: SimulatorBenchConfig) -> Speed:
    """Raises UnequalResults."""
    load, spec = LOADS[name], systems()[system]
    lengths_source, lengths = lengths_of(load)
    source = np.random.default_rng(config.seed)
    arrivals_s = poisson(load.rate_a_s, config.num_requests, source)
    workload = draw(lengths, arrivals_s, source, name=name)
    speeds: tuple[list[float], list[float]] = ([], [])
    for _ in range(config.rounds):
        results = []
        for fast_forward in (False, True):
            duration_s, result = _timed(spec, workload, fast_forward=fast_forward)
            speeds[fast_forward].append(_SECONDS_A_MINUTE * config.num_requests / duration_s)
            results.append(result)
        _check_equal(*results, where=f"{name}, {system}")
    return Speed(name, lengths_source, system, tuple(speeds[0]), tuple(speeds[1]))


def main(config: SimulatorBenchConfig, *, as_json: bool) -> int:
    """Returns the exit code."""
    return run_and_print(
        "weir bench simulator",
        lambda: [measure(name, system, config) for name in config.loads for system in systems()],
        as_dict=lambda speeds: {"config": asdict(config), "speeds": [asdict(speed) for speed in speeds]},
        tables=lambda speeds: [_table(speeds)],
        json_output=as_json,
    )


def _timed(spec: SystemSpec, workload: Workload, *, fast_forward: bool) -> tuple[float, SimResult]:
    gc.collect()
    begin_s = time.process_time()
    result = simulate(spec, workload, fast_forward=fast_forward)
    return time.process_time() - begin_s, result


def _check_equal(exact: SimResult, fast: SimResult, *, where: str) -> None:
    for name in ("outcomes", "gap_counts_by_ms", "queue_lengths", "tenant_service"):
        if getattr(exact, name) != getattr(fast, name):
            raise UnequalResults(f"{where}: {name} differ between step-exact and fast-forward")


def _table(speeds: Sequence[Speed]) -> Table:
    table = Table(title="Simulated requests a minute of processor time: median (lowest to highest round)")
    for name in ("lengths", "system", "step-exact", "fast-forward"):
        table.add_column(name, justify="right" if name.endswith(("exact", "forward")) else "left")
    for speed in speeds:
        source = "" if speed.source == LOADS[speed.load].trace else f" ({speed.source})"
        table.add_row(f"{speed.load}{source}", speed.system, _shown(speed.exact_a_min), _shown(speed.fast_a_min))
    return table


def _shown(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{_rounded(statistics.median(values))} ({_rounded(low)} to {_rounded(high)})"


def _rounded(value: float) -> str:
    return f"{round(value, -2):,.0f}"

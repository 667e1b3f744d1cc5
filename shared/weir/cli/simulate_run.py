"""What `weir simulate` does once its options are read: imports here are heavy, help must not wait for them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from weir.cli.console import stderr, stdout
from weir.policy.registry import PolicySpec
from weir.scheduling.limits.core_limits import CoreLimits
from weir.scheduling.limits.file import parse_limits
from weir.sim.profile import load_profile
from weir.sim.results.outcome import SimResult
from weir.sim.results.report import as_dict, as_tables
from weir.sim.results.slos import slo_from_ms, slos_of
from weir.sim.simulator import simulate
from weir.sim.spec import FailureSpec, LinkSpec, PoolSpec, Role, SystemSpec
from weir.sim.workloads.arrivals import burst, gamma, poisson
from weir.sim.workloads.compose import Lengths, draw
from weir.sim.workloads.replay import Arrivals, Replay, load_workload
from weir.sim.workloads.workload import Workload

_NUM_DRAWN = 1000
"""Requests without a trace, unless told."""


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """As on the command line."""

    trace: Path | None
    profile: str
    num_workers: tuple[int, int, int]
    """Local, prefill, decode; all 0: one local."""
    link_gbytes_per_s: float
    arrivals: str
    rate_a_s: float
    cv: float
    num_requests: int
    mean_tokens: tuple[float, float]
    """Of prompts and answers without a trace."""
    max_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    chunk_tokens: int
    num_pages: int
    policy: str
    limits_file: Path | None
    slo_ms: tuple[float, float]
    """TTFT, worst gap; 0: not asked."""
    failures: tuple[str, ...]
    seed: int
    is_step_exact: bool
    plots: Path | None


def run_simulate(options: SimulateOptions, *, as_json: bool) -> None:
    """Prints the result. Raises ValueError, InvalidRequest or OSError for options that cannot be used."""
    spec = make_spec(options)
    limits = CoreLimits()
    if options.limits_file is not None:
        limits = parse_limits(options.limits_file.read_text(encoding="utf-8"), limits)
    ttft_ms, gap_ms = options.slo_ms
    slos = slos_of(limits, slo_from_ms(ttft_ms, gap_ms, 0.0, 0.0))
    result = _simulate(spec, make_workload(options), limits, options)
    if options.plots is not None:
        from weir.sim.results.plots import run_pictures, write_pictures

        for path in write_pictures(run_pictures({options.policy: result}), options.plots):
            stderr.print(f"wrote {path}", markup=False, soft_wrap=True)
    if as_json:
        print(json.dumps(as_dict(result, slos), indent=2))
    else:
        for table in as_tables(result, slos):
            stdout.print(table)


def make_spec(options: SimulateOptions) -> SystemSpec:
    """Raises ValueError that names the option."""
    profile = load_profile(options.profile)
    pools = []
    num_local, num_prefill, num_decode = options.num_workers
    if (num_prefill == 0) != (num_decode == 0):
        raise ValueError(f"--prefill {num_prefill}, --decode {num_decode}: one needs the other")
    if not any(options.num_workers):
        num_local = 1
    roles: tuple[tuple[Role, int], ...] = (("local", num_local), ("prefill", num_prefill), ("decode", num_decode))
    for role, num_workers in roles:
        if num_workers:
            sizes = (options.max_num_seqs, options.max_num_batched_tokens, options.chunk_tokens, options.num_pages)
            pools.append(PoolSpec(role, num_workers, profile, *sizes))
    link = LinkSpec(options.link_gbytes_per_s) if options.link_gbytes_per_s else None
    return SystemSpec(tuple(pools), link, failures=tuple(parse_failure(text) for text in options.failures))


def parse_failure(text: str) -> FailureSpec:
    """WORKER@DIES_AT_S, or WORKER@DIES_AT_S-RETURNS_AT_S. Raises ValueError."""
    worker_id, _, times = text.partition("@")
    dies, _, returns = times.partition("-")
    try:
        return FailureSpec(worker_id, float(dies), float(returns) if returns else float("inf"))
    except ValueError as error:
        example = "give WORKER@DIES_AT_S or WORKER@DIES_AT_S-RETURNS_AT_S, such as decode-0@30-60"
        raise ValueError(f"--fail {text}: {example} ({error})") from error


def make_workload(options: SimulateOptions) -> Workload:
    """Raises ValueError, OSError."""
    if options.trace is not None:
        arrivals = cast(Arrivals, options.arrivals)
        replay = Replay(options.num_requests, options.rate_a_s, arrivals, options.cv, options.max_tokens)
        return load_workload(options.trace, replay, options.seed)
    num = options.num_requests or _NUM_DRAWN
    if options.rate_a_s == 0 and options.arrivals != "burst":
        raise ValueError("--rate 0: without a trace give the requests a second, or --arrivals burst")
    source = np.random.default_rng(options.seed)
    if options.arrivals == "burst":
        times = burst(num)
    elif options.arrivals == "gamma":
        times = gamma(options.rate_a_s, options.cv, num, source)
    elif options.arrivals in ("trace", "poisson"):
        times = poisson(options.rate_a_s, num, source)
    else:
        raise ValueError(f"--arrivals {options.arrivals}: must be trace, poisson, gamma or burst")
    prompts, outputs = (source.geometric(1 / mean, num).tolist() for mean in options.mean_tokens)
    if options.max_tokens:
        outputs = [min(num_tokens, options.max_tokens) for num_tokens in outputs]
    lengths = [Lengths(*pair) for pair in zip(prompts, outputs, strict=True)]
    return draw(lengths, times, source, max_tokens=options.max_tokens)


def _simulate(spec: SystemSpec, workload: Workload, limits: CoreLimits, options: SimulateOptions) -> SimResult:
    policy = PolicySpec.parse(options.policy)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, transient=True) as progress:
        bar = progress.add_task("simulating", total=len(workload.requests))

        def advanced(num_ended: int, at_s: float) -> None:
            progress.update(bar, completed=num_ended, description=f"simulated {at_s:.0f} s")

        return simulate(
            spec,
            workload,
            limits=limits,
            policy=policy,
            fast_forward=not options.is_step_exact,
            on_progress=advanced,
        )

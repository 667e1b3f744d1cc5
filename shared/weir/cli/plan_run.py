"""What `weir plan` does once its options are read: imports here are heavy, help must not wait for them."""

import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from weir.cli.console import stderr, stdout
from weir.cli.exit_codes import EXIT_FAILED
from weir.policy.registry import PolicySpec
from weir.scheduling.limits.core_limits import CoreLimits
from weir.scheduling.limits.file import parse_limits
from weir.sim.planning.planner import PlanJob, Planned, guess_prefill_share, make_plan
from weir.sim.planning.search import PlanLimits, PoolSizes, Prices
from weir.sim.profile import load_profile
from weir.sim.results.metrics import Slos
from weir.sim.results.slos import slo_from_ms, slos_of
from weir.sim.spec import LinkSpec
from weir.sim.workloads.replay import Arrivals, Replay, load_workload


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """As on the command line."""

    trace: Path
    profile: str
    decode_profile: str
    slo_ms: tuple[float, float, float, float]
    """TTFT, worst gap, TPOT, latency; 0: not asked."""
    attainment: float
    rate_a_s: float
    arrivals: str
    cv: float
    num_requests: int
    max_tokens: int
    num_seeds: int
    max_workers: int
    prices: tuple[float, float, float]
    """Prefill, decode, colocated."""
    link_gbytes_per_s: float
    max_num_seqs: int
    max_num_batched_tokens: int
    policy: str
    limits_file: Path | None


def run_plan(options: PlanOptions, *, num_processes: int, as_json: bool) -> int:
    """Prints the plan. Returns 1 if nothing of the allowed size is enough.

    Raises ValueError, InvalidRequest or OSError for options that cannot be used.
    """
    job = make_job(options)
    decode_step = (job.decode_profile or job.profile).step
    workload = load_workload(job.trace, job.replay)
    share = guess_prefill_share(workload, job.profile.step, decode_step, job.max_num_batched_tokens)
    limits = PlanLimits(options.attainment, options.max_workers, share, Prices(*options.prices))
    planned = _make_plan(job, limits, num_processes)
    if as_json:
        print(json.dumps(planned.as_dict(), indent=2))
    else:
        _print(planned, limits)
    return 0 if planned.plan.best is not None else EXIT_FAILED


def make_job(options: PlanOptions) -> PlanJob:
    """Raises ValueError, InvalidRequest, OSError."""
    replay = Replay(
        options.num_requests, options.rate_a_s, cast(Arrivals, options.arrivals), options.cv, options.max_tokens
    )
    limits = CoreLimits()
    if options.limits_file is not None:
        limits = parse_limits(options.limits_file.read_text(encoding="utf-8"), limits)
    slos = slos_of(limits, slo_from_ms(*options.slo_ms))
    if slos == Slos():
        asked = "--ttft-ms, --gap-ms, --tpot-ms, --latency-ms or a --limits-file whose lanes have SLOs"
        raise ValueError(f"nothing is asked: give {asked}")
    return PlanJob(
        trace=options.trace,
        replay=replay,
        slos=slos,
        profile=load_profile(options.profile),
        decode_profile=load_profile(options.decode_profile) if options.decode_profile else None,
        link=LinkSpec(options.link_gbytes_per_s) if options.link_gbytes_per_s else None,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        limits=limits,
        policy=PolicySpec.parse(options.policy),
        seeds=tuple(range(options.num_seeds if replay.is_random else 1)),
    )


def _make_plan(job: PlanJob, limits: PlanLimits, num_processes: int) -> Planned:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with (
        ProcessPoolExecutor(min(num_processes, len(job.seeds))) as executor,
        Progress(*columns, console=stderr, transient=True) as progress,
    ):
        bar = progress.add_task("simulating", total=None)

        def judged(num_judged: int, pools: PoolSizes, share: float) -> None:
            progress.update(bar, description=f"{num_judged} tried; {pools}: {share:.1%}")

        return make_plan(job, limits, executor if len(job.seeds) > 1 else None, judged)


def _print(planned: Planned, limits: PlanLimits) -> None:
    table = Table("workers", "cost", "attained", "TTFT p99 ms", "gap p99 ms", f"≥ {limits.target:.0%}")
    for column in table.columns[1:]:
        column.justify = "right"
    for candidate in planned.by_cost():
        half = candidate.attainment.high - candidate.attainment.mean
        spread = f" ± {half:.1%}" if half < 1 else ""
        latencies = (planned.mean(candidate.pools, figure) * 1e3 for figure in ("p99_ttft_s", "p99_worst_gap_s"))
        table.add_row(
            str(candidate.pools),
            f"{candidate.cost:g}",
            f"{candidate.attainment.mean:.1%}{spread}",
            *(f"{latency:.0f}" for latency in latencies),
            "yes" if candidate.is_enough else "no",
        )
    stdout.print(table)
    for what, best in (("split", planned.plan.best_split), ("colocated", planned.plan.best_local)):
        found = f"{best.pools}, cost {best.cost:g}" if best else f"none of up to {limits.max_workers} workers is enough"
        stdout.print(f"cheapest {what}: {found}", markup=False)
    if planned.plan.best is None:
        closest = max(planned.plan.candidates, key=lambda candidate: candidate.attainment.mean)
        more = "a weaker SLO, or workers of another profile" if closest.attainment.mean == 0 else "more --max-gpus"
        stdout.print(f"closest: {closest.pools} at {closest.attainment.mean:.1%}; try {more}", markup=False)

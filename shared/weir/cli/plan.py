"""`weir plan`: how many workers of which kind a load needs."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from weir.cli import EXIT_FAILED, EXIT_USAGE, options
from weir.cli.console import fail, stderr, stdout
from weir.cli.scheduling import read_limits_file

if TYPE_CHECKING:  # the simulator is heavy: help must not wait for it
    from weir.sim.planning import PlanJob, PlanLimits, Planned, PoolSizes
    from weir.sim.workloads.traces import Arrivals


def plan(
    trace: Annotated[Path, typer.Argument(help="Azure CSV, Mooncake or AIBrix JSONL, lengths CSV, or a capture.")],
    profile: Annotated[
        str, typer.Option(help="Cost profile of a worker: a name that comes with Weir, or a YAML file.")
    ],
    decode_profile: Annotated[str, typer.Option(help="Of decode workers, if they are of another kind.")] = "",
    ttft_ms: Annotated[float, typer.Option(min=0, help="SLO: time to first token. 0: not asked.")] = 0.0,
    gap_ms: Annotated[float, typer.Option(min=0, help="SLO: longest gap between two tokens.")] = 0.0,
    tpot_ms: Annotated[float, typer.Option(min=0, help="SLO: mean time of a token after the first.")] = 0.0,
    latency_ms: Annotated[float, typer.Option(min=0, help="SLO: until the last token.")] = 0.0,
    attainment: Annotated[float, typer.Option(help="Share of the offered requests that must meet the SLO.")] = 0.9,
    rate: Annotated[float, typer.Option(min=0, help="Mean requests a second. 0: the trace's own.")] = 0.0,
    arrivals: Annotated[str, typer.Option(help="trace, poisson, gamma or burst.")] = "trace",
    cv: Annotated[float, typer.Option(help="Coefficient of variation of gamma arrivals.")] = 1.0,
    num_requests: Annotated[int, typer.Option(min=0, help="Only the first of the trace. 0: all.")] = 0,
    max_tokens: Annotated[int, typer.Option(min=0, help="What each asks for at most. 0: the trace's largest.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Runs of each candidate where arrivals are drawn.")] = 3,
    max_gpus: Annotated[int, typer.Option(min=1, max=10_000, help="Workers of a candidate at most.")] = 32,
    prefill_price: Annotated[float, typer.Option(help="Of a prefill worker, in any unit.")] = 1.0,
    decode_price: Annotated[float, typer.Option(help="Of a decode worker.")] = 1.0,
    local_price: Annotated[float, typer.Option(help="Of a worker that serves alone.")] = 1.0,
    link_gbytes: Annotated[float, typer.Option(min=0, help="GB/s of each worker's link. 0: pages do not move.")] = 25.0,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences in a worker's batch.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a step.")] = 2048,
    policy: Annotated[str, typer.Option(help="Scheduling policy.")] = "fcfs",
    limits_file: Annotated[Path | None, typer.Option(help="Lanes and tenants; lanes' SLOs count for theirs.")] = None,
    processes: Annotated[int, typer.Option(min=1, max=64, help="Runs side by side.")] = 2,
    as_json: options.AsJson = False,
) -> None:
    """The cheapest prefill and decode workers, or workers that serve alone, that meet an SLO under a trace's load.

    Simulates candidates until the cheapest is found, and shows every one that was tried.

    \b
    weir plan azure_2023_code.csv --profile h100-llama3-8b --ttft-ms 500 --gap-ms 100 --rate 20
    weir plan capture.jsonl --profile measured.yaml --ttft-ms 2000 --max-gpus 8 --json
    """
    from weir.policy.registry import PolicySpec
    from weir.scheduling.limits import CoreLimits
    from weir.sim.planning import PlanJob, PlanLimits, Prices, guess_prefill_share
    from weir.sim.profile import load_profile
    from weir.sim.results.metrics import Slos, slo_from_ms, slos_of
    from weir.sim.spec import LinkSpec
    from weir.sim.workloads.traces import Replay, load_workload

    try:
        replay = Replay(num_requests, rate, cast("Arrivals", arrivals), cv, max_tokens)
        limits = CoreLimits() if limits_file is None else read_limits_file(limits_file)
        slos = slos_of(limits, slo_from_ms(ttft_ms, gap_ms, tpot_ms, latency_ms))
        if slos == Slos():
            asked = "--ttft-ms, --gap-ms, --tpot-ms, --latency-ms or a --limits-file whose lanes have SLOs"
            raise ValueError(f"nothing is asked: give {asked}")
        job = PlanJob(
            trace=trace,
            replay=replay,
            slos=slos,
            profile=load_profile(profile),
            decode_profile=load_profile(decode_profile) if decode_profile else None,
            link=LinkSpec(link_gbytes) if link_gbytes else None,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            limits=limits,
            policy=PolicySpec.parse(policy),
            seeds=tuple(range(seeds if replay.is_random else 1)),
        )
        decode_step = (job.decode_profile or job.profile).step
        share = guess_prefill_share(load_workload(trace, replay), job.profile.step, decode_step, max_num_batched_tokens)
        search = PlanLimits(attainment, max_gpus, share, Prices(prefill_price, decode_price, local_price))
        planned = _make_plan(job, search, processes)
    except (ValueError, OSError) as error:
        fail(str(error), code=EXIT_USAGE)
    if as_json:
        print(json.dumps(planned.as_dict(), indent=2))
    else:
        _print(planned, search)
    raise typer.Exit(0 if planned.plan.best is not None else EXIT_FAILED)


def _make_plan(job: "PlanJob", limits: "PlanLimits", num_processes: int) -> "Planned":
    from concurrent.futures import ProcessPoolExecutor

    from weir.sim.planning import make_plan

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with (
        ProcessPoolExecutor(min(num_processes, len(job.seeds))) as executor,
        Progress(*columns, console=stderr, transient=True) as progress,
    ):
        bar = progress.add_task("simulating", total=None)

        def judged(num_judged: int, pools: "PoolSizes", share: float) -> None:
            progress.update(bar, description=f"{num_judged} tried; {pools}: {share:.1%}")

        return make_plan(job, limits, executor if len(job.seeds) > 1 else None, judged)


def _print(planned: "Planned", limits: "PlanLimits") -> None:
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

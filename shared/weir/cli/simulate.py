"""`weir simulate`: a system that is not there, under a load that was or may be."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from weir.cli import EXIT_USAGE, options
from weir.cli.console import fail, need_extra, stderr, stdout
from weir.cli.scheduling import read_limits_file

if TYPE_CHECKING:  # the simulator is heavy: help must not wait for it
    from weir.policy.registry import PolicySpec
    from weir.scheduling.limits import CoreLimits, Crossing
    from weir.sim.results.metrics import SimResult
    from weir.sim.spec import FailureSpec, Role, SystemSpec
    from weir.sim.workloads.traces import Arrivals
    from weir.sim.workloads.workload import Workload

_NUM_SAMPLED = 1000
"""Requests without a trace, unless --num-requests says how many."""
_HOST_LATENCY_MS = 0.1


def simulate(
    trace: Annotated[
        Path | None, typer.Argument(help="Azure CSV, Mooncake or AIBrix JSONL, lengths CSV, or a capture.")
    ] = None,
    profile: Annotated[
        str, typer.Option(help="Cost profile of a worker: a name that comes with Weir, or a YAML file.")
    ] = "h100-llama3-8b",
    local: Annotated[int, typer.Option(min=0, help="Workers that serve alone.")] = 0,
    prefill: Annotated[int, typer.Option(min=0, help="Prefill workers.")] = 0,
    decode: Annotated[int, typer.Option(min=0, help="Decode workers.")] = 0,
    link_gbytes: Annotated[
        float, typer.Option(min=0, help="GB/s between prefill and decode. 0: pages do not move.")
    ] = 25.0,
    host: Annotated[
        list[str] | None, typer.Option(help="A host, its workers as PREFILL+DECODE, such as 2+1; repeat it for each.")
    ] = None,
    host_gbit: Annotated[float, typer.Option(min=0.001, help="Gb/s between each two hosts.")] = 25.0,
    crossing: Annotated[
        str, typer.Option(help="Between hosts: nothing, prefixes, or prompts, which one computes for another.")
    ] = "prompts",
    arrivals: Annotated[str, typer.Option(help="trace, poisson, gamma or burst.")] = "trace",
    rate: Annotated[float, typer.Option(min=0, help="Mean requests a second. 0: the trace's own.")] = 0.0,
    cv: Annotated[float, typer.Option(help="Coefficient of variation of gamma arrivals.")] = 1.0,
    num_requests: Annotated[int, typer.Option(min=0, help="Only the first of the trace. 0: all.")] = 0,
    prompt_tokens: Annotated[float, typer.Option(min=1, help="Without a trace: mean length of prompts.")] = 500.0,
    output_tokens: Annotated[float, typer.Option(min=1, help="Without a trace: mean length of answers.")] = 200.0,
    max_tokens: Annotated[int, typer.Option(min=0, help="What each asks for at most. 0: the trace's largest.")] = 0,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences in a worker's batch.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a step.")] = 2048,
    chunk_tokens: Annotated[int, typer.Option(min=0, help="Of one prompt in a step. 0: the whole step.")] = 0,
    num_pages: Annotated[int, typer.Option(min=0, help="Of each worker. 0: the profile's.")] = 0,
    policy: Annotated[str, typer.Option(help="Scheduling policy, NAME or NAME:KEY=VALUE,...")] = "fcfs",
    limits_file: Annotated[Path | None, typer.Option(help="Lanes and tenants; lanes' SLOs count for theirs.")] = None,
    ttft_ms: Annotated[float, typer.Option(min=0, help="SLO: time to first token. 0: not asked.")] = 0.0,
    gap_ms: Annotated[float, typer.Option(min=0, help="SLO: longest gap between two tokens.")] = 0.0,
    fail_worker: Annotated[
        list[str] | None, typer.Option("--fail", help="WORKER@DIES_AT_S or WORKER@DIES_AT_S-RETURNS_AT_S; repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same result.")] = 0,
    step_exact: Annotated[bool, typer.Option("--step-exact", help="Every step by the real batcher: slower.")] = False,
    plots: Annotated[Path | None, typer.Option(help="Folder for PNG pictures.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Run the scheduler and the batchers on simulated time: latencies, throughput and fairness of a system.

    Without a trace, lengths are drawn (geometric), arrivals are Poisson and --rate is needed.

    \b
    weir simulate azure_2023_code.csv --local 2
    weir simulate azure_2023_code.csv --prefill 1 --decode 1 --rate 8 --arrivals poisson --ttft-ms 500
    weir simulate --rate 10 --num-requests 2000 --local 1 --policy shortest-prompt --json
    weir simulate --rate 10 --num-requests 2000 --host 2+0 --host 0+2 --host-gbit 100
    """
    if plots is not None:
        need_extra("plots", "weir simulate --plots")
    from weir.policy.registry import PolicySpec
    from weir.scheduling.limits import CoreLimits
    from weir.sim.results.metrics import slo_from_ms, slos_of
    from weir.sim.results.report import as_dict, as_tables
    from weir.sim.workloads.traces import Replay, load_workload

    try:
        sizes = (max_num_seqs, max_num_batched_tokens, chunk_tokens or max_num_batched_tokens, num_pages)
        counts: dict[Role, int] = {"local": local, "prefill": prefill, "decode": decode}
        failures = tuple(_parse_failure(text) for text in fail_worker or ())
        if host:
            if any(counts.values()):
                raise ValueError("--host: its workers are all there are; leave --local, --prefill and --decode out")
            spec = _make_hosts(profile, [_parse_host(text) for text in host], sizes, host_gbit, failures)
        else:
            spec = _make_spec(profile, counts, sizes, link_gbytes, failures)
        limits = CoreLimits() if limits_file is None else read_limits_file(limits_file)
        limits = replace(limits, placing=replace(limits.placing, crossing=cast("Crossing", crossing)))
        slos = slos_of(limits, slo_from_ms(ttft_ms, gap_ms, 0.0, 0.0))
        if trace is not None:
            replay = Replay(num_requests, rate, cast("Arrivals", arrivals), cv, max_tokens)
            workload = load_workload(trace, replay, seed)
        else:
            mean_tokens = (prompt_tokens, output_tokens)
            workload = _sample_workload(arrivals, rate, cv, num_requests or _NUM_SAMPLED, mean_tokens, max_tokens, seed)
        result = _simulate(spec, workload, limits, PolicySpec.parse(policy), fast_forward=not step_exact)
        if plots is not None:
            _write_plots(policy, result, plots)
    except (ValueError, OSError) as error:
        fail(str(error), code=EXIT_USAGE)
    if as_json:
        print(json.dumps(as_dict(result, slos), indent=2))
    else:
        for table in as_tables(result, slos):
            stdout.print(table)


def _make_spec(
    profile_name: str,
    num_workers: "dict[Role, int]",
    sizes: tuple[int, int, int, int],
    link_gbytes_per_s: float,
    failures: "tuple[FailureSpec, ...]",
) -> "SystemSpec":
    """`sizes` of each worker: sequences and tokens of a step, tokens of one prompt in it, pages. No worker at all: a
    local one. Raises ValueError that names the option.
    """
    from weir.sim.profile import load_profile
    from weir.sim.spec import LinkSpec, PoolSpec, SystemSpec

    profile = load_profile(profile_name)
    if (num_workers["prefill"] == 0) != (num_workers["decode"] == 0):
        counts = f"--prefill {num_workers['prefill']}, --decode {num_workers['decode']}"
        raise ValueError(f"{counts}: one needs the other")
    if not any(num_workers.values()):
        num_workers = {"local": 1}
    pools = tuple(PoolSpec(role, num, profile, *sizes) for role, num in num_workers.items() if num)
    return SystemSpec(pools, LinkSpec(link_gbytes_per_s) if link_gbytes_per_s else None, failures=failures)


def _make_hosts(
    profile_name: str,
    hosts: "Sequence[tuple[int, int]]",
    sizes: tuple[int, int, int, int],
    gbit_s: float,
    failures: "tuple[FailureSpec, ...]",
) -> "SystemSpec":
    """`hosts`: prefill and decode workers of each."""
    from weir.sim.profile import load_profile
    from weir.sim.spec import LinkSpec, PoolSpec, SystemSpec

    profile, pools = load_profile(profile_name), list[PoolSpec]()
    for number, (num_prefill, num_decode) in enumerate(hosts):
        name = f"host-{number}"
        pools += [PoolSpec("prefill", num_prefill, profile, *sizes, host=name)] if num_prefill else []
        pools += [PoolSpec("decode", num_decode, profile, *sizes, host=name)] if num_decode else []
    return SystemSpec(tuple(pools), failures=failures, host_link=LinkSpec(gbit_s / 8, _HOST_LATENCY_MS))


def _parse_host(text: str) -> tuple[int, int]:
    """PREFILL+DECODE. Raises ValueError."""
    prefill, _, decode = text.partition("+")
    if not (prefill.isdecimal() and decode.isdecimal()) or int(prefill) + int(decode) == 0:
        raise ValueError(f"--host {text}: give its prefill and decode workers as PREFILL+DECODE, such as 2+1")
    return int(prefill), int(decode)


def _parse_failure(text: str) -> "FailureSpec":
    """WORKER@DIES_AT_S, or WORKER@DIES_AT_S-RETURNS_AT_S. Raises ValueError."""
    from weir.sim.spec import FailureSpec

    worker_id, _, times = text.partition("@")
    dies, _, returns = times.partition("-")
    try:
        return FailureSpec(worker_id, float(dies), float(returns) if returns else float("inf"))
    except ValueError as error:
        example = "give WORKER@DIES_AT_S or WORKER@DIES_AT_S-RETURNS_AT_S, such as decode-0@30-60"
        raise ValueError(f"--fail {text}: {example} ({error})") from error


def _sample_workload(
    arrivals: str,
    rate_a_s: float,
    cv: float,
    num_requests: int,
    mean_tokens: tuple[float, float],
    max_tokens: int,
    seed: int,
) -> "Workload":
    """`mean_tokens` of prompts and answers. Raises ValueError."""
    import numpy as np

    from weir.sim.workloads.workload import Lengths, burst, draw, gamma, poisson

    if rate_a_s == 0 and arrivals != "burst":
        raise ValueError("--rate 0: without a trace give the requests a second, or --arrivals burst")
    source = np.random.default_rng(seed)
    if arrivals == "burst":
        times = burst(num_requests)
    elif arrivals == "gamma":
        times = gamma(rate_a_s, cv, num_requests, source)
    elif arrivals in ("trace", "poisson"):
        times = poisson(rate_a_s, num_requests, source)
    else:
        raise ValueError(f"--arrivals {arrivals}: must be trace, poisson, gamma or burst")
    prompts, outputs = (source.geometric(1 / mean, num_requests).tolist() for mean in mean_tokens)
    if max_tokens:
        outputs = [min(num_tokens, max_tokens) for num_tokens in outputs]
    lengths = [Lengths(*pair) for pair in zip(prompts, outputs, strict=True)]
    return draw(lengths, times, source, max_tokens=max_tokens)


def _simulate(
    spec: "SystemSpec", workload: "Workload", limits: "CoreLimits", policy: "PolicySpec", *, fast_forward: bool
) -> "SimResult":
    from weir.sim.simulator import simulate as run

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, transient=True) as progress:
        bar = progress.add_task("simulating", total=len(workload.requests))

        def advanced(num_ended: int, at_s: float) -> None:
            progress.update(bar, completed=num_ended, description=f"simulated {at_s:.0f} s")

        return run(spec, workload, limits=limits, policy=policy, fast_forward=fast_forward, on_progress=advanced)


def _write_plots(policy: str, result: "SimResult", folder: Path) -> None:
    from weir.sim.results.plots import run_pictures, write_pictures

    for path in write_pictures(run_pictures({policy: result}), folder):
        stderr.print(f"wrote {path}", markup=False, soft_wrap=True)

"""`weir simulate`: a system that is not there, under a load that was or may be."""

from pathlib import Path
from typing import Annotated

import typer

from weir.cli import options
from weir.cli.console import fail, need_extra
from weir.cli.exit_codes import EXIT_USAGE


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
    """
    if plots is not None:
        need_extra("plots", "weir simulate --plots")
    from weir.cli.simulate_run import SimulateOptions, run_simulate
    from weir.core.errors import InvalidRequest

    try:
        run_simulate(
            SimulateOptions(
                trace=trace,
                profile=profile,
                num_workers=(local, prefill, decode),
                link_gbytes_per_s=link_gbytes,
                arrivals=arrivals,
                rate_a_s=rate,
                cv=cv,
                num_requests=num_requests,
                mean_tokens=(prompt_tokens, output_tokens),
                max_tokens=max_tokens,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                chunk_tokens=chunk_tokens or max_num_batched_tokens,
                num_pages=num_pages,
                policy=policy,
                limits_file=limits_file,
                slo_ms=(ttft_ms, gap_ms),
                failures=tuple(fail_worker or ()),
                seed=seed,
                is_step_exact=step_exact,
                plots=plots,
            ),
            as_json=as_json,
        )
    except InvalidRequest as error:
        fail(f"{limits_file}: {error.message}", code=EXIT_USAGE)
    except (ValueError, OSError) as error:
        fail(str(error), code=EXIT_USAGE)

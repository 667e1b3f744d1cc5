"""`weir plan`: how many workers of which kind a load needs."""

from pathlib import Path
from typing import Annotated

import typer

from weir.cli import options
from weir.cli.console import fail
from weir.cli.exit_codes import EXIT_USAGE


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
    from weir.cli.plan_run import PlanOptions, run_plan
    from weir.core.errors import InvalidRequest

    try:
        exit_code = run_plan(
            PlanOptions(
                trace=trace,
                profile=profile,
                decode_profile=decode_profile,
                slo_ms=(ttft_ms, gap_ms, tpot_ms, latency_ms),
                attainment=attainment,
                rate_a_s=rate,
                arrivals=arrivals,
                cv=cv,
                num_requests=num_requests,
                max_tokens=max_tokens,
                num_seeds=seeds,
                max_workers=max_gpus,
                prices=(prefill_price, decode_price, local_price),
                link_gbytes_per_s=link_gbytes,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                policy=policy,
                limits_file=limits_file,
            ),
            num_processes=processes,
            as_json=as_json,
        )
    except InvalidRequest as error:
        fail(f"{limits_file}: {error.message}", code=EXIT_USAGE)
    except (ValueError, OSError) as error:
        fail(str(error), code=EXIT_USAGE)
    raise typer.Exit(exit_code)

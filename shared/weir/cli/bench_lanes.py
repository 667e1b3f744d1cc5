"""`weir bench lanes`: a lane under a flood."""

from pathlib import Path
from typing import Annotated

import typer

from weir.cli import options


def lanes(
    base_url: Annotated[str, typer.Option(help="A running stack's HTTP port.")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Model that the stack serves.")] = "smollm2-135m",
    num_flood: Annotated[int, typer.Option(min=1, help="Requests that come at once in the lane batch.")] = 96,
    flood_output_len: Annotated[int, typer.Option(min=1, help="Tokens of their answers.")] = 96,
    num_urgent: Annotated[int, typer.Option(min=1, help="Requests that arrive while those are served.")] = 20,
    urgent_rate: Annotated[float, typer.Option(min=0.001, help="Their Poisson arrivals a second.")] = 1.0,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each kind, in turns.")] = 3,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    api_key: options.ApiKey = "",
    out: Annotated[Path | None, typer.Option(dir_okay=False, help="Also write the table here, as Markdown.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """How long urgent requests wait for their first token under a flood: in a lane of their own, and in the flood's.

    \b
    weir bench lanes --rounds 3
    """
    from weir.bench.serving.lanes import LanesConfig
    from weir.bench.serving.lanes import main as bench_lanes

    config = LanesConfig(
        base_url,
        model,
        num_flood=num_flood,
        flood_output_len=flood_output_len,
        num_urgent=num_urgent,
        urgent_rate=urgent_rate,
        rounds=rounds,
        seed=seed,
        api_key=api_key,
    )
    raise typer.Exit(bench_lanes(config, json_output=as_json, out=out))

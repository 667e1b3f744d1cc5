"""`weir bench calibrate`: the simulator beside the stack."""

from pathlib import Path
from typing import Annotated

import typer

from weir.cli import options
from weir.cli.console import EXIT_USAGE, fail


def calibrate(
    model: Annotated[str, typer.Option(help="Known name, GGUF file or Hugging Face folder.")] = "smollm2-135m",
    loads: Annotated[str, typer.Option(help="Parts of what the stack serves when all comes at once.")] = "0.5,0.8",
    num_requests: Annotated[int, typer.Option(min=2, help="Of a round.")] = 60,
    rounds: Annotated[int, typer.Option(min=2, help="Of each load, real and simulated in turns.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Of lengths, prompts and arrivals.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Also write calibration.md and calibration.json here.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """How far simulated latencies and throughput are from those of a stack on this machine, which this starts.

    Steps cost what its workers have fitted to those before the round; delays are measured with one request at a time.

    \b
    weir bench calibrate --rounds 3 --out results
    """
    from weir.bench.calibrate import CalibrateConfig
    from weir.bench.calibrate_main import main as bench_calibrate

    try:
        parts = tuple(float(part) for part in loads.split(","))
        config = CalibrateConfig(model, parts, num_requests, rounds, seed=seed)
    except ValueError as error:
        fail(f"--loads {loads}: {error}", code=EXIT_USAGE)
    raise typer.Exit(bench_calibrate(config, json_output=as_json, out=out))

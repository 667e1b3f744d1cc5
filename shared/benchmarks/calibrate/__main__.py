"""The simulator beside the stack."""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.calibrate.loads import CalibrateConfig
from benchmarks.calibrate.report import main as run_calibrate
from weir.cli import options
from weir.cli.console import fail
from weir.cli.exit_codes import EXIT_USAGE


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
    python -m benchmarks.calibrate --rounds 3 --out results
    """
    try:
        parts = tuple(float(part) for part in loads.split(","))
        config = CalibrateConfig(model, parts, num_requests, rounds, seed=seed)
    except ValueError as error:
        fail(f"--loads {loads}: {error}", code=EXIT_USAGE)
    raise typer.Exit(run_calibrate(config, json_output=as_json, out=out))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(calibrate)
    app(prog_name="python -m benchmarks.calibrate")

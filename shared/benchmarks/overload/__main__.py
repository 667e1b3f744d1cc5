"""`python -m benchmarks.overload`: the experiment, printed as a table."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.overload.experiment import OverloadConfig
from benchmarks.overload.experiment import run as run_experiment
from benchmarks.overload.report import figures, table
from weir.cli import options
from weir.cli.console import fail, stderr
from weir.runtime.process_tuning import raise_descriptor_limit


def overload(
    model: Annotated[str, typer.Option(help="Known name, GGUF file or Hugging Face folder.")] = "smollm2-135m",
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 64,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 32,
    peak_s: Annotated[float, typer.Option(min=1, help="Seconds for what can be served, before and after.")] = 20.0,
    flood_s: Annotated[float, typer.Option(min=1, help="Seconds of the flood.")] = 120.0,
    factor: Annotated[float, typer.Option(min=0.1, help="The flood's rate over what can be served.")] = 10.0,
    other_s: Annotated[float, typer.Option(min=5, help="Seconds for the other tenant alone.")] = 30.0,
    burst: Annotated[int, typer.Option(min=1, help="Requests that come at once.")] = 1500,
    num_idle: Annotated[int, typer.Option(min=0, help="Connections on each port on which nothing comes.")] = 5000,
    max_wait_s: Annotated[float, typer.Option(min=0.1, help="Of the lane: who would wait longer is refused.")] = 4.0,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts and arrivals.")] = 0,
    out: Annotated[Path | None, typer.Option(dir_okay=False, help="Also write the table here, as Markdown.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Ten times what a stack can serve, for two minutes, on a stack of its own that this starts.

    \b
    python -m benchmarks.overload --flood-s 30
    """
    config = OverloadConfig(
        model=model,
        input_len=input_len,
        output_len=output_len,
        peak_s=peak_s,
        flood_s=flood_s,
        factor=factor,
        other_s=other_s,
        burst=burst,
        num_idle=num_idle,
        max_wait_s=max_wait_s,
        seed=seed,
    )
    raise_descriptor_limit()
    load_before = os.getloadavg()[0]
    try:
        found = figures(config, run_experiment(config, lambda what: stderr.print(what, markup=False, highlight=False)))
    except (RuntimeError, OSError) as error:
        fail(f"python -m benchmarks.overload: {error}")
    text = table(config, found, (load_before, os.getloadavg()[0]))
    print(json.dumps(found, indent=1) if as_json else text)
    if out is not None:
        out.write_text(text)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(overload)
    app(prog_name="python -m benchmarks.overload")

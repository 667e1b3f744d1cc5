"""The measurement of predictors of output lengths."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.predictors.main import PredictorsConfig
from benchmarks.predictors.main import main as measure_predictors
from weir.cli import options


def predictors(
    model: Annotated[str, typer.Option(help="Model whose tokens and embeddings are used.")] = "smollm2-135m",
    answers: Annotated[list[Path] | None, typer.Option(help="Files of --generate. Default: the kept one.")] = None,
    splits: Annotated[int, typer.Option(min=2, max=50, help="Of each data set, each trained anew.")] = 5,
    out: Annotated[Path | None, typer.Option(help="Also write predictors.md and predictors.json here.")] = None,
    rows: Annotated[Path | None, typer.Option(help="Also write scored lengths here, as CSV.")] = None,
    generate: Annotated[
        Path | None, typer.Option(help="Only answer the prompts, twice, and keep lengths here.")
    ] = None,
    sets: Annotated[str, typer.Option(help="With --generate: of gsm8k, humaneval, alpaca_eval.")] = "gsm8k,humaneval",
    most: Annotated[int, typer.Option(min=1, help="With --generate: prompts of each set at most.")] = 600,
    num_threads: Annotated[int, typer.Option(min=1, help="With --generate: threads of the model.")] = 2,
    as_json: options.AsJson = False,
) -> None:
    """How well output lengths are ranked from prompts alone, and what a prediction costs.

    Prompts are looked for in the folder `traces` of WEIR_TEST_DATA.

    \b
    python -m benchmarks.predictors --out results
    """
    config = PredictorsConfig(
        model=model,
        splits=splits,
        out=out,
        rows=rows,
        generate=generate,
        generated_sets=tuple(sets.split(",")),
        most=most,
        num_threads=num_threads,
    )
    config = replace(config, answers=tuple(answers)) if answers else config
    raise typer.Exit(measure_predictors(config, json_output=as_json))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(predictors)
    app(prog_name="python -m benchmarks.predictors")

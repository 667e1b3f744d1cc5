"""`python -m benchmarks.predictors`: measures predictors, or makes the answers that they are measured on."""

import csv
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks.predictors.answers import Answer, AnswerLimits, Question, answer_all, write_answers
from benchmarks.predictors.data import KEPT_ANSWERS, DataSet, Prompter, alpaca_sets, own_sets, questions
from benchmarks.predictors.measure import (
    PredictorsReport,
    SetResult,
    as_json,
    as_markdown,
    measure_cost,
    measure_group,
    pairwise_tau,
    scored_lengths,
)
from weir.cli import options
from weir.cli.console import fail
from weir.model.errors import ModelError
from weir.model.files.source import ModelSource, resolve_model
from weir.model.tokens.chat_template import load_chat_template
from weir.model.tokens.tokenizer import load_tokenizer
from weir.model.tokens.vectors import load_token_table
from weir.policy.predictors.features import PromptFeatures
from weir.policy.predictors.token_table import TokenTable
from weir.training.make import train_predictor
from weir.training.samples import Samples


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
    json_output: options.AsJson = False,
) -> None:
    """How well output lengths are ranked from prompts alone, and what a prediction costs.

    Prompts are looked for in the folder `traces` of WEIR_TEST_DATA.

    \b
    python -m benchmarks.predictors --out results
    """
    try:
        source = resolve_model(model)
        template = load_chat_template(source)
        prompter = Prompter(load_tokenizer(source), template)
        if generate is not None:
            todo = [question for name in sets.split(",") for question in questions(name, most, prompter)]
            _generate(source, todo, AnswerLimits(num_threads=num_threads), generate)
            return
        table = load_token_table(source, prompter.tokenizer, template)
        alpaca = alpaca_sets(prompter)
        own = [data_set for path in answers or (KEPT_ANSWERS,) for data_set in own_sets(path, prompter)]
        report = _measure(alpaca, own, table, splits)
        if rows is not None:
            _write_rows(rows, [*alpaca, *own], table)
        markdown = as_markdown(report)
        print(as_json(report) if json_output else markdown)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / "predictors.md").write_text(markdown)
            (out / "predictors.json").write_text(as_json(report) + "\n")
    except (ModelError, OSError, ValueError, KeyError) as error:
        fail(f"python -m benchmarks.predictors: {error}")


def _measure(alpaca: Sequence[DataSet], own: Sequence[DataSet], table: TokenTable, num_splits: int) -> PredictorsReport:
    results: list[SetResult] = []
    for _, group in groupby([*alpaca, *own], key=lambda data_set: data_set.group):
        results += measure_group(list(group), table, num_splits)
    first = alpaca[0]
    samples = Samples(PromptFeatures(table).of(first.prompts), first.num_output_tokens)
    predictor = train_predictor(table, samples, first.group)
    return PredictorsReport(
        splits=num_splits,
        sets=tuple(results),
        pairs=tuple(pairwise_tau(alpaca)),
        costs=tuple(measure_cost(predictor, first.prompts)),
    )


def _generate(source: ModelSource, todo: Sequence[Question], limits: AnswerLimits, path: Path) -> None:
    """Hours for all sets on two cores; what has been answered is written every 100 answers."""
    found: list[Answer] = []
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("answers", total=len(todo))

        def keep(answer: Answer) -> None:
            found.append(answer)
            bar.advance(task)
            if len(found) % 100 == 0:
                write_answers(path, source.name, limits, found)

        answer_all(source, todo, limits, keep)
    write_answers(path, source.name, limits, found)


def _write_rows(path: Path, sets: Sequence[DataSet], table: TokenTable) -> None:
    """A CSV file that the simulator can draw requests from."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["data_set", "num_prompt_tokens", "num_output_tokens", "score", "predicted_output_tokens"])
        for data_set in sets:
            for row in scored_lengths(data_set, table):
                figures = (f"{row.score:.4f}", f"{row.predicted_output_tokens:.1f}")
                writer.writerow([data_set.name, row.num_prompt_tokens, row.num_output_tokens, *figures])


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(predictors)
    app(prog_name="python -m benchmarks.predictors")

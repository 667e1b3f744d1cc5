"""Runs the measurement, prints it, and keeps it; or makes the answers that it needs."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from benchmarks.predictors.answers import Answer, AnswerLimits, answer_all, write_answers
from benchmarks.predictors.data import KEPT_ANSWERS, PROMPT_SETS, DataSet, Prompter, alpaca_sets, own_sets, questions
from benchmarks.predictors.measure import SetResult, measure_cost, measure_group, pairwise_tau, scored_lengths
from benchmarks.predictors.report import PredictorsReport, as_json, as_markdown
from weir.model.errors import ModelError
from weir.model.files.source import resolve_model
from weir.model.tokens.chat_template import load_chat_template
from weir.model.tokens.tokenizer import load_tokenizer
from weir.model.tokens.vectors import load_token_table
from weir.policy.predictors.features import PromptFeatures
from weir.policy.predictors.token_table import TokenTable
from weir.training.make import train_predictor
from weir.training.samples import Samples


@dataclass(frozen=True, slots=True)
class PredictorsConfig:
    """`generate`: make the answers, write them there, and do nothing else; `most` prompts of each set."""

    model: str = "smollm2-135m"
    answers: Sequence[Path] = (KEPT_ANSWERS,)
    splits: int = 5
    out: Path | None = None
    rows: Path | None = None
    generate: Path | None = None
    generated_sets: Sequence[str] = PROMPT_SETS[:2]
    most: int = 600
    num_threads: int = 2


def main(config: PredictorsConfig, *, json_output: bool) -> int:
    """Returns the exit code: 1 if the model, the data or the answers cannot be read."""
    try:
        source = resolve_model(config.model)
        prompter = Prompter(load_tokenizer(source), load_chat_template(source))
        if config.generate is not None:
            _generate(config, prompter, config.generate)
            return 0
        table = load_token_table(source, prompter.tokenizer, load_chat_template(source))
        report = _measure(config, prompter, table)
    except (ModelError, OSError, ValueError, KeyError) as error:
        Console(stderr=True).print(f"python -m benchmarks.predictors: {error}", markup=False, highlight=False)
        return 1
    markdown = as_markdown(report)
    print(as_json(report) if json_output else markdown)
    if config.out is not None:
        config.out.mkdir(parents=True, exist_ok=True)
        (config.out / "predictors.md").write_text(markdown)
        (config.out / "predictors.json").write_text(as_json(report) + "\n")
    return 0


def _measure(config: PredictorsConfig, prompter: Prompter, table: TokenTable) -> PredictorsReport:
    alpaca = alpaca_sets(prompter)
    own = [data_set for path in config.answers for data_set in own_sets(path, prompter)]
    results: list[SetResult] = []
    for _, group in groupby([*alpaca, *own], key=lambda data_set: data_set.group):
        results += measure_group(list(group), table, config.splits)
    if config.rows is not None:
        _write_rows(config.rows, [*alpaca, *own], table)
    first = alpaca[0]
    samples = Samples(PromptFeatures(table).of(first.prompts), first.num_output_tokens)
    predictor = train_predictor(table, samples, first.group)
    return PredictorsReport(
        splits=config.splits,
        sets=tuple(results),
        pairs=tuple(pairwise_tau(alpaca)),
        costs=tuple(measure_cost(predictor, first.prompts)),
    )


def _generate(config: PredictorsConfig, prompter: Prompter, path: Path) -> None:
    """Hours for all sets on two cores; what has been answered is written every 100 answers."""
    limits = AnswerLimits(num_threads=config.num_threads)
    todo = [q for name in config.generated_sets for q in questions(name, config.most, prompter)]
    found: list[Answer] = []
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("answers", total=len(todo))

        def keep(answer: Answer) -> None:
            found.append(answer)
            bar.advance(task)
            if len(found) % 100 == 0:
                write_answers(path, config.model, limits, found)

        answer_all(resolve_model(config.model), todo, limits, keep)
    write_answers(path, config.model, limits, found)


def _write_rows(path: Path, sets: Sequence[DataSet], table: TokenTable) -> None:
    """A CSV file that the simulator can draw requests from."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["data_set", "num_prompt_tokens", "num_output_tokens", "score", "predicted_output_tokens"])
        for data_set in sets:
            for row in scored_lengths(data_set, table):
                figures = (f"{row.score:.4f}", f"{row.predicted_output_tokens:.1f}")
                writer.writerow([data_set.name, row.num_prompt_tokens, row.num_output_tokens, *figures])

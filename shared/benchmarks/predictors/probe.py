"""`python -m benchmarks.predictors.probe`: do hidden states, or what was said before, tell how long an answer will be?

Three steps over one folder: the built-in model's answers with their tokens, its states along them, the report.
"""

import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks.predictors.answers import Answer, AnswerLimits, answer_all
from benchmarks.predictors.data import HUMANEVAL_FILE, Prompter, alpaca_sets, kept_lengths, prompt_texts, questions
from benchmarks.predictors.hidden_states import (
    LAYERS,
    StateReader,
    StateTable,
    read_states,
    read_token_ids,
    write_token_ids,
)
from benchmarks.predictors.probe_report import ProbesReport, probes_as_json, probes_as_markdown
from benchmarks.predictors.state_probes import AnsweredPrompts, measure_ages, measure_start
from benchmarks.predictors.turns import linked, measure_turns
from benchmarks.traces import MOONCAKE, traces_folder
from weir.cli.console import fail
from weir.model.errors import ModelError
from weir.model.files.source import ModelSource, resolve_model
from weir.model.tokens.chat_template import load_chat_template
from weir.model.tokens.tokenizer import load_tokenizer
from weir.model.tokens.vectors import load_token_table
from weir.policy.predictors.features import PromptFeatures
from weir.policy.predictors.token_table import TokenTable
from weir.sim.workloads.traces import read_trace

_MODEL = "smollm2-135m"
_MOST_PROMPTS = 600
_MOST_TOKENS = 2048
_COST_LAYER = 22
_SEEDS = (0, 1)
_TOKEN_IDS = "token_ids.jsonl"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
Work = Annotated[Path, typer.Argument(help="Folder of what is kept between the steps.")]
Sets = Annotated[str, typer.Option(help="Of alpaca_eval, humaneval, gsm8k; the latter two have kept lengths.")]


@app.command()
def answers(
    work: Work,
    sets: Sets = "alpaca_eval",
    num_threads: Annotated[int, typer.Option(min=1, help="Threads of the model.")] = 2,
) -> None:
    """Answers every prompt with both seeds, as `python -m benchmarks.predictors --generate`, and keeps the tokens."""
    source, prompter, _ = _model()
    work.mkdir(parents=True, exist_ok=True)
    path = work / _TOKEN_IDS
    done = {(a.data_set, a.index, a.seed) for a in read_token_ids(path)} if path.exists() else set()
    asked = [question for name in sets.split(",") for question in questions(name, _MOST_PROMPTS, prompter, _SEEDS)]
    todo = [question for question in asked if (question.data_set, question.index, question.seed) not in done]
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("answers", total=len(todo))

        def keep(answer: Answer) -> None:
            write_token_ids(path, answer)
            bar.advance(task)

        if todo:
            answer_all(source, todo, AnswerLimits(num_threads=num_threads), keep)


@app.command()
def states(work: Work, sets: Sets = "alpaca_eval") -> None:
    """Reads the states along the answers that there are, or, of sets whose answers' lengths alone are kept, those of
    the prompts. One core, some minutes a thousand answers."""
    source, prompter, table = _model()
    reader = StateReader(source, LAYERS, _MOST_TOKENS)
    path = work / _TOKEN_IDS
    found = read_token_ids(path) if path.exists() else []
    with Progress(console=Console(stderr=True)) as bar:
        for name in sets.split(","):
            prompts = [prompter.tokens_of(text) for text in prompt_texts(name)[:_MOST_PROMPTS]]
            some = [answer for answer in found if answer.data_set == name] or kept_lengths(name)
            task = bar.add_task(name, total=len(some))
            first = len(table.frame.prefix)
            read_states(reader, prompts, some, first, partial(bar.advance, task)).save(work / f"{name}.npz")


@app.command()
def report(
    work: Work,
    sets: Sets = "alpaca_eval",
    seeds: Annotated[int, typer.Option(min=1, max=50, help="Foldings of each data set.")] = 5,
    out: Annotated[Path | None, typer.Option(help="Also write probes.md and probes.json here.")] = None,
) -> None:
    """What ranks how well. The foreign models' answers need the states of alpaca_eval. Besides the prompts of the sets
    it takes humaneval.jsonl.gz, whose prompts are timed, and mooncake_conversation.jsonl.gz, for conversations."""
    folder = traces_folder(HUMANEVAL_FILE, MOONCAKE)
    source, prompter, table = _model()
    # what is short comes first: what lacks or is broken should not show after hours of foldings
    turns = linked(read_trace(folder / MOONCAKE).requests)
    state_ms = _state_ms_a_token(source, [prompter.tokens_of(text) for text in prompt_texts("humaneval")[:60]])
    names, all_seeds = sets.split(","), range(seeds)
    features = PromptFeatures(table)
    tables = {name: StateTable.load(work / f"{name}.npz") for name in names}
    rows = {name: features.of([prompter.tokens_of(t) for t in prompt_texts(name)[:_MOST_PROMPTS]]) for name in names}
    asked = [_own(name, tables[name], rows[name]) for name in names]
    if "alpaca_eval" in tables:
        asked += [
            _foreign(one.name, rows["alpaca_eval"], tables["alpaca_eval"], one.num_output_tokens)
            for one in alpaca_sets(prompter)
        ]
    made = ProbesReport(
        num_seeds=seeds,
        starts=[measure_start(one, all_seeds) for one in asked],
        ages={
            f"{name}, own": measure_ages(rows[name], table, all_seeds)
            for name, table in tables.items()
            if table.has_answers
        },
        state_ms_a_token=state_ms,
        cost_layer=_COST_LAYER,
        turns={"Mooncake": measure_turns(turns)},
    )
    print(probes_as_markdown(made))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "probes.md").write_text(probes_as_markdown(made))
        (out / "probes.json").write_text(probes_as_json(made))


def _state_ms_a_token(source: ModelSource, prompts: Sequence[Sequence[int]]) -> float:
    """Median over prompts; the first one warms up."""
    reader = StateReader(source, (_COST_LAYER,), _MOST_TOKENS)
    taken_ms = []
    for prompt in prompts:
        started_s = time.process_time()
        reader.rows_of(prompt)
        taken_ms.append(1e3 * (time.process_time() - started_s) / len(prompt))
    return statistics.median(taken_ms[1:])


def _model() -> tuple[ModelSource, Prompter, TokenTable]:
    source = resolve_model(_MODEL)
    tokenizer, template = load_tokenizer(source), load_chat_template(source)
    return source, Prompter(tokenizer, template), load_token_table(source, tokenizer, template)


def _own(name: str, table: StateTable, rows: np.ndarray) -> AnsweredPrompts:
    """The prompts that were answered with both seeds."""
    place = {(int(i), int(s)): number for number, (i, s) in enumerate(zip(table.index, table.seed, strict=True))}
    both = sorted(index for index, seed in place if seed == 0 and (index, 1) in place)
    first, second = (np.array([place[index, seed] for index in both], np.int64) for seed in _SEEDS)
    return AnsweredPrompts(
        f"{name}, own",
        rows[both],
        table.last[first, 0],
        table.mean[first],
        table.num_output_tokens[first],
        table.num_output_tokens[second],
    )


def _foreign(name: str, rows: np.ndarray, table: StateTable, lengths: np.ndarray) -> AnsweredPrompts:
    """Of a prompt's states it does not matter which answer they were read along."""
    first = {int(index): number for number, index in reversed(list(enumerate(table.index)))}
    there = sorted(first)
    chosen = np.array([first[index] for index in there], np.int64)
    return AnsweredPrompts(name, rows[there], table.last[chosen, 0], table.mean[chosen], lengths[there])


if __name__ == "__main__":
    try:
        app(prog_name="python -m benchmarks.predictors.probe")
    except (ModelError, OSError, ValueError, KeyError) as error:
        fail(f"python -m benchmarks.predictors.probe: {error}")

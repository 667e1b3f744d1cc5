"""Prompts and the lengths of their answers, as data sets to measure predictors on.

alpaca_eval, three models   the models' own outputs (AlpacaEval, CC BY-NC 4.0), read from WEIR_TEST_DATA
the built-in model          lengths of its answers, made by `benchmarks.predictors --generate`; those to gsm8k and
                            humaneval (both MIT) are in the folder `kept`
"""

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.predictors.answers import Answer, Question
from benchmarks.traces import traces_folder
from weir.model.tokens.chat_template import ChatTemplate
from weir.model.tokens.tokenizer import Tokenizer

_KEPT = Path(__file__).parent / "kept"
KEPT_ANSWERS = _KEPT / "answers_smollm2-135m.json"
KEPT_COSTS = _KEPT / "predictors.json"
KEPT_PROBES = _KEPT / "probes.json"
_ALPACA_MODELS = ("Mistral-7B-Instruct-v0.2", "Meta-Llama-3-8B-Instruct", "Qwen1.5-7B-Chat")
ALPACA_FILES = tuple(f"alpaca_eval_dev_{model}.jsonl.gz" for model in _ALPACA_MODELS)
HUMANEVAL_FILE = "humaneval.jsonl.gz"
_PROMPT_FILES = {
    "gsm8k": ("gsm8k_train.jsonl.gz", "question"),
    "humaneval": (HUMANEVAL_FILE, "prompt"),
    "alpaca_eval": (ALPACA_FILES[0], "instruction"),
}


@dataclass(frozen=True)
class DataSet:
    """`again`: lengths of second answers to the same prompts, None where there is only one. `group`: sets of one model
    are trained on together."""

    name: str
    group: str
    prompts: Sequence[tuple[int, ...]]
    num_output_tokens: npt.NDArray[np.int64]
    again: npt.NDArray[np.int64] | None = None


class Prompter:
    """Renders and tokenizes as a gateway does."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.tokenizer = tokenizer
        self._template = template

    def tokens_of(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(self._template.render([{"role": "user", "content": text}]), add_bos=False))


def alpaca_sets(prompter: Prompter) -> list[DataSet]:
    """The three models' outputs, counted by the built-in tokenizer, the end of the answer included. Raises OSError,
    TracesMissing."""
    sets = []
    for model, file in zip(_ALPACA_MODELS, ALPACA_FILES, strict=True):
        rows = _rows(traces_folder() / file)
        prompts = [prompter.tokens_of(row["instruction"]) for row in rows]
        lengths = [len(prompter.tokenizer.encode(row["output"], add_bos=False)) + 1 for row in rows]
        sets.append(DataSet(f"alpaca_eval, {model}", model, prompts, np.array(lengths, np.int64)))
    return sets


def own_sets(path: Path, prompter: Prompter) -> list[DataSet]:
    """What `answers.write_answers` kept, for prompts that were answered with both seeds. Raises OSError, ValueError."""
    content = json.loads(path.read_text())
    sets = []
    for name, by_seed in content["lengths"].items():
        texts = prompt_texts(name)
        first, second = (by_seed[seed] for seed in ("0", "1"))
        indices = sorted(int(index) for index in first.keys() & second.keys())
        prompts = [prompter.tokens_of(texts[index]) for index in indices]
        lengths, again = (np.array([side[str(index)] for index in indices], np.int64) for side in (first, second))
        sets.append(DataSet(f"{name}, {content['model']}", content["model"], prompts, lengths, again))
    return sets


def kept_lengths(name: str) -> list[Answer]:
    """The kept answers to one set's prompts, both seeds, without their tokens. Raises OSError, ValueError."""
    by_set = json.loads(KEPT_ANSWERS.read_text())["lengths"]
    if name not in by_set:
        raise ValueError(f"answers to {name}: none are kept, only to {', '.join(by_set)}; `probe answers` makes them")
    return [
        Answer(name, int(index), int(seed), 0, length, False)
        for seed, lengths in by_set[name].items()
        for index, length in lengths.items()
    ]


def prompt_texts(name: str) -> list[str]:
    """Raises ValueError for an unknown data set, OSError."""
    if name not in _PROMPT_FILES:
        raise ValueError(f"data set {name!r}: there are {', '.join(_PROMPT_FILES)}")
    file, field = _PROMPT_FILES[name]
    return [str(row[field]) for row in _rows(traces_folder() / file)]


def questions(name: str, most: int, prompter: Prompter, seeds: Sequence[int] = (0, 1)) -> list[Question]:
    """The first `most` prompts of a set, once for each seed."""
    return [
        Question(name, index, seed, prompter.tokens_of(text))
        for index, text in enumerate(prompt_texts(name)[:most])
        for seed in seeds
    ]


def _rows(path: Path) -> list[Mapping[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]

"""How long a model's own answers are: what length predictors are trained on and measured by, without a stack around it.

Every prompt is answered once for each seed, at temperature 1; two answers to one prompt say how much of a length no
predictor can know. Lengths alone are kept, never text.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weir.core.sampling import SamplingParams
from weir.engine.plan import ChunkPlan, ModelRunner, SampleSpec, StepPlan
from weir.kv.geometry import num_pages_for
from weir.model.cpu.core_share import FixedShare
from weir.model.files.source import ModelSource
from weir.model.load import load_model


@dataclass(frozen=True, slots=True)
class Question:
    """Prompt number `index` of a data set, to be answered with a seed."""

    data_set: str
    index: int
    seed: int
    prompt_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """`num_output_tokens` counts the token that ended it; without one it was cut at the most allowed."""

    data_set: str
    index: int
    seed: int
    num_prompt_tokens: int
    num_output_tokens: int
    is_cut: bool


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """Of one run."""

    max_tokens: int = 512
    max_num_seqs: int = 32
    chunk_tokens: int = 256
    num_threads: int = 2


def answer_all(
    source: ModelSource, questions: Sequence[Question], limits: AnswerLimits, on_answer: Callable[[Answer], None]
) -> None:
    """Answers all, in int8; `on_answer` is called as they end. Raises ModelError, ValueError for too long a prompt."""
    weights = load_model(source, "int8", FixedShare(limits.num_threads))
    stop_ids = frozenset(weights.config.eos_token_ids)
    longest = max(len(question.prompt_token_ids) for question in questions) + limits.max_tokens
    if longest > weights.config.max_context_tokens:
        raise ValueError(f"prompt and answer take {longest} tokens, the model has {weights.config.max_context_tokens}")
    num_pages = limits.max_num_seqs * num_pages_for(longest)
    runner = weights.runner_over(np.zeros((num_pages, weights.page_geometry.page_bytes), np.uint8))
    runner.warm_up()
    for answer in answers(runner, questions, limits, stop_ids):
        on_answer(answer)


def answers(
    runner: ModelRunner, questions: Sequence[Question], limits: AnswerLimits, stop_ids: frozenset[int]
) -> Iterator[Answer]:
    """Each slot has pages of its own, enough for the longest; a question joins as soon as a slot is free."""
    pages_each = max(num_pages_for(len(q.prompt_token_ids) + limits.max_tokens) for q in questions)
    waiting = list(reversed(questions))
    running: dict[int, _Running] = {}
    step = 0
    while waiting or running:
        for slot in range(limits.max_num_seqs):
            if slot not in running and waiting:
                table = tuple(range(slot * pages_each, (slot + 1) * pages_each))
                running[slot] = _Running(waiting.pop(), slot, table, limits)
        sampled = runner.run(StepPlan(step, tuple(sequence.plan() for sequence in running.values()))).token_ids
        step += 1
        for slot, sequence in list(running.items()):
            answer = sequence.record(sampled.get(slot), stop_ids)
            if answer is not None:
                del running[slot]
                yield answer


class _Running:
    """A question while it is answered."""

    def __init__(self, question: Question, slot: int, table: tuple[int, ...], limits: AnswerLimits) -> None:
        self._question = question
        self._slot = slot
        self._table = table
        self._limits = limits
        self._params = SamplingParams(temperature=1.0, seed=question.seed * 1_000_003 + question.index)
        self._token_ids = list(question.prompt_token_ids)
        self._num_computed = 0
        self._planned = 0

    @property
    def _num_output(self) -> int:
        return len(self._token_ids) - len(self._question.prompt_token_ids)

    def plan(self) -> ChunkPlan:
        chunk = tuple(self._token_ids[self._num_computed : self._num_computed + self._limits.chunk_tokens])
        self._planned = len(chunk)
        is_last = self._num_computed + len(chunk) == len(self._token_ids)
        sample = SampleSpec(self._params, self._num_output) if is_last else None
        table = self._table[: num_pages_for(self._num_computed + len(chunk))]
        return ChunkPlan(self._slot, self._num_computed, chunk, table, sample)

    def record(self, token_id: int | None, stop_ids: frozenset[int]) -> Answer | None:
        """None: it goes on."""
        self._num_computed += self._planned
        if token_id is None:
            return None
        self._token_ids.append(token_id)
        is_cut = token_id not in stop_ids
        if is_cut and self._num_output < self._limits.max_tokens:
            return None
        question = self._question
        num_prompt = len(question.prompt_token_ids)
        return Answer(question.data_set, question.index, question.seed, num_prompt, self._num_output, is_cut)


def write_answers(path: Path, model: str, limits: AnswerLimits, found: Sequence[Answer]) -> None:
    """One JSON object: lengths by data set and seed, in the order of the prompts' indices."""
    sets: dict[str, dict[str, dict[str, int]]] = {}
    for answer in sorted(found, key=lambda a: (a.data_set, a.seed, a.index)):
        by_seed = sets.setdefault(answer.data_set, {})
        by_seed.setdefault(str(answer.seed), {})[str(answer.index)] = answer.num_output_tokens
    content = {"model": model, "temperature": 1.0, "max_tokens": limits.max_tokens, "lengths": sets}
    path.write_text(json.dumps(content, separators=(",", ":")) + "\n")

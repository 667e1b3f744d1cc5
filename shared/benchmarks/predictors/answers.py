"""How long a model's own answers are: what length predictors are trained on and measured by, without a stack around it.

Every prompt is answered once for each seed, at temperature 1; two answers to one prompt say how much of a length no
predictor can know. Lengths alone are kept, never text.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weir.bench.solo import EngineJob, JobRecord, WallTimeline, run_alone
from weir.core.sampling import SamplingParams
from weir.engine.batching.batcher import BatchLimits
from weir.engine.batching.running import RunningSettings
from weir.engine.plan import ModelRunner
from weir.kv.geometry import PAGE_TOKENS, num_pages_for
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
    token_ids: tuple[int, ...] = ()


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
    longest = max(len(question.prompt_token_ids) for question in questions) + limits.max_tokens
    if longest > weights.config.max_context_tokens:
        raise ValueError(f"prompt and answer take {longest} tokens, the model has {weights.config.max_context_tokens}")
    num_pages = limits.max_num_seqs * num_pages_for(longest)
    runner = weights.runner_over(np.zeros((num_pages, weights.page_geometry.page_bytes), np.uint8))
    runner.warm_up()
    stop_ids = tuple(weights.config.eos_token_ids)
    answer_with(runner, questions, limits, stop_ids, weights.config.vocab_size, on_answer)


def answer_with(
    runner: ModelRunner,
    questions: Sequence[Question],
    limits: AnswerLimits,
    stop_ids: tuple[int, ...],
    vocab_size: int,
    on_answer: Callable[[Answer], None],
) -> None:
    """The runner has pages for as many of the longest as run at one time."""
    jobs = [
        EngineJob(
            question.prompt_token_ids,
            limits.max_tokens,
            sampling=SamplingParams(temperature=1.0, seed=question.seed * 1_000_003 + question.index),
            stop_token_ids=stop_ids,
        )
        for question in questions
    ]
    pages_each = max(job.num_pages for job in jobs)
    batch = BatchLimits(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_seqs * limits.chunk_tokens,
        chunk_tokens=limits.chunk_tokens,
        max_context_tokens=pages_each * PAGE_TOKENS + 1,
        vocab_size=vocab_size,
    )

    def ended(index: int, record: JobRecord) -> None:
        question, num_prompt = questions[index], len(questions[index].prompt_token_ids)
        is_cut = record.token_ids[-1] not in stop_ids
        token_ids = tuple(record.token_ids)
        on_answer(
            Answer(question.data_set, question.index, question.seed, num_prompt, len(token_ids), is_cut, token_ids)
        )

    num_pages = limits.max_num_seqs * pages_each
    run_alone(jobs, runner, batch, RunningSettings(), num_pages, WallTimeline(), ended)


def write_answers(path: Path, model: str, limits: AnswerLimits, found: Sequence[Answer]) -> None:
    """One JSON object: lengths by data set and seed, in the order of the prompts' indices."""
    sets: dict[str, dict[str, dict[str, int]]] = {}
    for answer in sorted(found, key=lambda a: (a.data_set, a.seed, a.index)):
        by_seed = sets.setdefault(answer.data_set, {})
        by_seed.setdefault(str(answer.seed), {})[str(answer.index)] = answer.num_output_tokens
    content = {"model": model, "temperature": 1.0, "max_tokens": limits.max_tokens, "lengths": sets}
    path.write_text(json.dumps(content, separators=(",", ":")) + "\n")

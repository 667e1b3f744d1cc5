"""`weir bench quality`: what int8 arithmetic costs in quality, on a text of your own.

Perplexity is exp of the mean negative log-likelihood of the text's tokens, each predicted from those before it in
windows of `WINDOW_TOKENS` that begin anew.
"""

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weir.bench.report import run_and_print
from weir.core.device import Precision
from weir.core.errors import WeirError
from weir.core.sampling import TokenLogprobs
from weir.engine.plan import ChunkPlan, ScoreSpec, StepPlan
from weir.kv.geometry import num_pages_for
from weir.model.cpu.core_share import FixedShare
from weir.model.errors import ModelError
from weir.model.files.source import resolve_model
from weir.model.load import LoadedWeights, load_model
from weir.model.tokens.tokenizer import load_tokenizer

WINDOW_TOKENS = 512


@dataclass(frozen=True, slots=True)
class QualityReport:
    """Of one text. `same_top_token`: share of positions where both arithmetics find the same token most likely."""

    model: str
    num_tokens: int
    fp32_perplexity: float
    int8_perplexity: float
    same_top_token: float

    @property
    def perplexity_ratio(self) -> float:
        return self.int8_perplexity / self.fp32_perplexity


def main(model: str, text_path: Path, json_output: bool = False, max_tokens: int | None = None) -> int:
    """Prints a line, or JSON. Returns the exit code: 1 if the model or the text cannot be read."""
    return run_and_print(
        "weir bench quality",
        lambda: measure(model, text_path.read_text(), max_tokens),
        as_dict=lambda report: dataclasses.asdict(report) | {"perplexity_ratio": report.perplexity_ratio},
        tables=lambda report: [as_line(report)],
        json_output=json_output,
        errors=(ModelError, WeirError, OSError, ValueError),
    )


def as_line(report: QualityReport) -> str:
    return (
        f"{report.model}, {report.num_tokens} tokens: perplexity fp32 {report.fp32_perplexity:.4f}, "
        f"int8 {report.int8_perplexity:.4f} ({report.perplexity_ratio - 1:+.2%}); "
        f"same most likely token at {report.same_top_token:.1%} of the positions"
    )


def measure(model: str, text: str, max_tokens: int | None = None) -> QualityReport:
    """Both arithmetics, one after the other. Raises ModelError, WeirError, and ValueError for a text in which no token
    follows another."""
    source = resolve_model(model)
    token_ids = load_tokenizer(source).encode(text)[:max_tokens]
    if len(token_ids) < 2:
        raise ValueError(f"the text has {len(token_ids)} tokens: at least 2 are needed, the second is predicted")
    share = FixedShare(len(os.sched_getaffinity(0)))
    scores = {}
    for precision in ("fp32", "int8"):
        asked: Precision = "fp32" if precision == "fp32" else "int8"
        scores[precision] = score_text(load_model(source, asked, share), token_ids)
    same = [a.top[0][0] == b.top[0][0] for a, b in zip(scores["fp32"], scores["int8"], strict=True)]
    return QualityReport(
        source.name,
        len(token_ids),
        perplexity(scores["fp32"]),
        perplexity(scores["int8"]),
        sum(same) / len(same),
    )


def score_text(weights: LoadedWeights, token_ids: Sequence[int]) -> list[TokenLogprobs]:
    """Of every token but the first of each window, with the most likely one."""
    window_tokens = min(WINDOW_TOKENS, weights.config.max_context_tokens)
    table = tuple(range(num_pages_for(window_tokens)))
    runner = weights.runner_over(np.zeros((len(table), weights.page_geometry.page_bytes), np.uint8))
    scores: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), window_tokens):
        window = tuple(token_ids[start : start + window_tokens])
        plan = StepPlan(0, (ChunkPlan(0, 0, window, table, None, ScoreSpec(window[1:], 1)),))
        scores += runner.run(plan).prompt_logprobs[0]
    return scores


def perplexity(scores: Sequence[TokenLogprobs]) -> float:
    return math.exp(-sum(score.logprob for score in scores) / len(scores))

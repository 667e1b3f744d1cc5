"""What int8 arithmetic costs the built-in model: perplexity on a text, and greedy answers beside those of fp32."""

import os
from pathlib import Path

import pytest
from tests.golden.generation import Golden, generate, load_golden, poisoned_pages

from weir.bench.quality import QualityReport, measure
from weir.model.cpu.core_share import FixedShare
from weir.model.files.catalog import SMOLLM2_135M
from weir.model.files.source import resolve_model
from weir.model.load import load_model

pytestmark = [pytest.mark.golden, pytest.mark.timeout(1800)]

MOST_PERPLEXITY = 1.01
LEAST_SAME_TOP_TOKEN = 0.95
LEAST_COMMON_START = 0.5
POOL_PAGES = 400


@pytest.fixture(scope="module")
def report() -> QualityReport:
    text = (Path(__file__).parent / "gsm8k.txt").read_text()
    return measure(SMOLLM2_135M.name, text)


def test_perplexity_rises_by_less_than_one_percent(report: QualityReport) -> None:
    print(f"{report}, ratio {report.perplexity_ratio:.5f}")
    assert report.num_tokens > 20_000
    assert 1 / MOST_PERPLEXITY < report.perplexity_ratio < MOST_PERPLEXITY


def test_the_most_likely_token_is_nearly_always_the_same(report: QualityReport) -> None:
    assert report.same_top_token > LEAST_SAME_TOP_TOKEN


def common_start(prompt: Golden, output: list[int]) -> int:
    """Tokens before the first that differs."""
    pairs = enumerate(zip(prompt.expected_ids, output, strict=True))
    return next((place for place, (expected, sampled) in pairs if expected != sampled), len(output))


def test_greedy_answers_begin_as_those_of_fp32() -> None:
    prompts = load_golden()
    weights = load_model(resolve_model(SMOLLM2_135M.name), "int8", FixedShare(os.cpu_count() or 1))
    runner = weights.runner_over(poisoned_pages(POOL_PAGES, weights.page_geometry.page_bytes))
    runner.warm_up()
    outputs = generate(runner, prompts, POOL_PAGES, chunk_tokens=64, max_sequences=32)
    alone = generate(runner, prompts[:8], POOL_PAGES, chunk_tokens=512, max_sequences=1)
    assert outputs[:8] == alone, "greedy tokens do not depend on the batch"
    starts = [common_start(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]
    lengths = [len(prompt.expected_ids) for prompt in prompts]
    num_equal = sum(start == length for start, length in zip(starts, lengths, strict=True))
    share = sum(starts) / sum(lengths)
    print(
        f"{num_equal} of {len(prompts)} answers equal; {share:.1%} of the tokens before a difference; {sorted(starts)}"
    )
    assert share > LEAST_COMMON_START

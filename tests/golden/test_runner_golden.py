"""The runner's greedy tokens are those of Hugging Face transformers on the same dequantized weights."""

from collections.abc import Sequence

import pytest
import torch
from tests.golden.generation import (
    ALLOWED_DIFFERENCES,
    ALLOWED_MARGIN,
    Golden,
    generate,
    load_golden,
    poisoned_pages,
)

from weir.engine.plan import ChunkPlan, StepPlan
from weir.kv.geometry import num_pages_for
from weir.model.architecture import ModelConfig
from weir.model.files.catalog import SMOLLM2_135M
from weir.model.files.config import load_model_config
from weir.model.files.source import resolve_model
from weir.model.tokens.tokenizer import load_tokenizer
from weir.model.torch.batch import build_batch
from weir.model.torch.decoder import Decoder
from weir.model.torch.paged_kv import PagedKv
from weir.model.torch.runner import TorchRunner
from weir.model.torch.weights import Weights, load_weights

pytestmark = pytest.mark.timeout(600)  # beside other work

POOL_PAGES = 400
MOST_SEQUENCES = 32


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return load_model_config(resolve_model(SMOLLM2_135M.name))


@pytest.fixture(scope="module")
def weights(config: ModelConfig) -> Weights:
    return load_weights(resolve_model(SMOLLM2_135M.name), config)


@pytest.fixture
def runner(config: ModelConfig, weights: Weights) -> TorchRunner:
    return TorchRunner(config, weights, poisoned_pages(POOL_PAGES, config.page_geometry.page_bytes))


@pytest.fixture(scope="module")
def golden() -> list[Golden]:
    prompts = load_golden()
    assert len(prompts) == 64
    assert all(len(prompt.expected_ids) == 64 for prompt in prompts)
    return prompts


def logits_after(token_ids: Sequence[int], config: ModelConfig, weights: Weights) -> torch.Tensor:
    num_pages = num_pages_for(len(token_ids))
    kv = PagedKv(config.page_geometry, poisoned_pages(num_pages, config.page_geometry.page_bytes))
    plan = StepPlan(0, (ChunkPlan(0, 0, tuple(token_ids), tuple(range(num_pages)), None),))
    decoder = Decoder(config, weights)
    with torch.inference_mode():
        hidden = decoder.forward(build_batch(plan, kv, config), kv)
        return decoder.logits(hidden[-1:])[0]


def check(prompts: Sequence[Golden], outputs: Sequence[Sequence[int]], config: ModelConfig, weights: Weights) -> None:
    """Two of the greatest logits may lie so close that two libraries order them differently; only that is forgiven."""
    different = [
        (prompt, output)
        for prompt, output in zip(prompts, outputs, strict=True)
        if tuple(output) != prompt.expected_ids
    ]
    for prompt, output in different:
        assert len(output) == len(prompt.expected_ids)
        place = next(i for i, (a, b) in enumerate(zip(output, prompt.expected_ids, strict=True)) if a != b)
        logits = logits_after([*prompt.prompt_ids, *prompt.expected_ids[:place]], config, weights)
        expected, sampled = (float(logits[ids[place]]) for ids in (prompt.expected_ids, output))
        print(
            f"prompt {prompt.name}, token {place}: expected {prompt.expected_ids[place]} with logit {expected:.6f}, "
            f"drew {output[place]} with logit {sampled:.6f}"
        )
        assert abs(expected - sampled) <= ALLOWED_MARGIN, prompt.name
    assert len(different) <= ALLOWED_DIFFERENCES, [prompt.name for prompt, _ in different]


def test_the_file_holds_prompts_of_5_to_900_tokens_as_weir_tokenizes_them(golden: list[Golden]) -> None:
    lengths = [len(prompt.prompt_ids) for prompt in golden]
    assert (min(lengths), max(lengths)) == (5, 900)
    tokenizer = load_tokenizer(resolve_model(SMOLLM2_135M.name))
    assert [tuple(tokenizer.encode(prompt.text)) for prompt in golden] == [prompt.prompt_ids for prompt in golden]


@pytest.mark.parametrize(
    ("chunk_tokens", "sample"), [pytest.param(16, (0, 20, 36), marks=pytest.mark.long), (512, (5, 41, 63))]
)
def test_a_sample_in_one_batch_equals_transformers(
    chunk_tokens: int,
    sample: tuple[int, ...],
    golden: list[Golden],
    runner: TorchRunner,
    config: ModelConfig,
    weights: Weights,
) -> None:
    prompts = [golden[number] for number in sample]
    check(prompts, generate(runner, prompts, POOL_PAGES, chunk_tokens, MOST_SEQUENCES), config, weights)


def test_a_sample_one_after_the_other_equals_transformers(
    golden: list[Golden], runner: TorchRunner, config: ModelConfig, weights: Weights
) -> None:
    prompts = [golden[3], golden[31]]
    check(prompts, generate(runner, prompts, POOL_PAGES, 64, max_sequences=1), config, weights)


@pytest.mark.golden
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("max_sequences", [1, MOST_SEQUENCES], ids=["alone", "batched"])
@pytest.mark.parametrize("chunk_tokens", [16, 64, 512])
def test_every_prompt_equals_transformers(
    chunk_tokens: int,
    max_sequences: int,
    golden: list[Golden],
    runner: TorchRunner,
    config: ModelConfig,
    weights: Weights,
) -> None:
    check(golden, generate(runner, golden, POOL_PAGES, chunk_tokens, max_sequences), config, weights)

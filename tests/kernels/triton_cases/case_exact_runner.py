"""A whole model with exact products: logits and pages of a sequence are the same to the bit in every batch."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.kernels.triton_cases.case_runner import (
    CONFIG,
    FILTERED,
    GREEDY,
    KERNEL_TYPE,
    LIMITS,
    NUM_PAGES,
    PROMPTS,
    SCHEDULE,
    WARM,
    Conversation,
    GreedyOnCpu,
    random_weights,
    run_again,
)
from tests.kernels.triton_cases.support import DEVICE, IS_INTERPRETED
from tests.unit.model.device_model import empty_pages, weights_on

from weir.core.sampling import SamplingParams, TokenLogprobs
from weir.engine.plan import ChunkPlan, SampleSpec, ScoreSpec, StepPlan
from weir.kv.geometry import num_pages_for
from weir.model.torch.weights import Weights
from weir.model.triton.graphs import cuda_graph_capture
from weir.model.triton.runner import TritonRunner

# the interpreter has no bf16 matrix product
DTYPE = torch.float32 if IS_INTERPRETED else torch.bfloat16
LIKELY = SamplingParams(temperature=0.0, logprobs=5)
PROMPT = tuple(PROMPTS[0])
OWN_TABLE = tuple(range(num_pages_for(len(PROMPT) + 1)))


@pytest.fixture(scope="module")
def weights() -> Weights:
    torch.manual_seed(0)
    return random_weights(CONFIG)


def exact_runner(
    weights: Weights, pages: torch.Tensor | None = None, max_sequences: int = LIMITS.max_sequences
) -> TritonRunner:
    """Over pages that are NaN until they are written."""
    dtype = DTYPE if pages is None else pages.dtype
    if pages is None:
        pages = empty_pages(CONFIG, NUM_PAGES, DEVICE, dtype).fill_(float("nan"))
    limits = replace(LIMITS, max_rows=128, max_sequences=max_sequences)
    return TritonRunner(CONFIG, weights_on(weights, DEVICE, dtype), pages, limits, is_exact=True)


def other_prompt(number: int) -> ChunkPlan:
    """One page long, in a page of its own."""
    tokens = tuple((13 * number + 5 * i) % CONFIG.vocab_size for i in range(number % 15 + 1))
    return ChunkPlan(1 + number, 0, tokens, (len(OWN_TABLE) + number,), SampleSpec(GREEDY, 0))


def other_decode(number: int) -> ChunkPlan:
    start = number % 15 + 1
    return ChunkPlan(1 + number, start, (number + 2,), (len(OWN_TABLE) + number,), SampleSpec(GREEDY, 1))


def decoded_among(
    weights: Weights, num_others: int, place: int, *, is_replayed: bool
) -> tuple[TokenLogprobs, torch.Tensor]:
    """What a sequence's first decode step says, and its page then, with so many other rows, of which `place` are before
    its own."""
    pages = empty_pages(CONFIG, len(OWN_TABLE) + 8, DEVICE, DTYPE).fill_(float("nan"))
    runner = exact_runner(weights, pages, max_sequences=8)
    if is_replayed:
        runner.capture_graphs(run_again if IS_INTERPRETED else cuda_graph_capture())
    runner.run(StepPlan(0, (ChunkPlan(0, 0, PROMPT, OWN_TABLE, SampleSpec(LIKELY, 0)),)))
    if num_others:
        runner.run(StepPlan(0, tuple(other_prompt(number) for number in range(num_others))))
    decodes = [other_decode(number) for number in range(num_others)]
    decodes.insert(place, ChunkPlan(0, len(PROMPT), (9,), OWN_TABLE, SampleSpec(LIKELY, 1)))
    result = runner.run(StepPlan(0, tuple(decodes)))
    return result.logprobs[0], pages[: len(OWN_TABLE)].clone()


@pytest.mark.parametrize(
    "is_replayed", [False, pytest.param(True, marks=pytest.mark.long)], ids=["launched", "replayed"]
)
@pytest.mark.parametrize(("num_others", "place"), [pytest.param(1, 1, marks=pytest.mark.long), (3, 2)])
def test_a_decode_is_the_same_to_the_bit_in_every_batch(
    weights: Weights, num_others: int, place: int, is_replayed: bool
) -> None:
    alone, own_pages = decoded_among(weights, 0, 0, is_replayed=False)
    found, pages = decoded_among(weights, num_others, place, is_replayed=is_replayed)
    assert found == alone
    assert torch.equal(pages.nan_to_num(), own_pages.nan_to_num())


def prefilled(weights: Weights, cuts: Sequence[int], num_others: int) -> tuple[torch.Tensor, TokenLogprobs]:
    """The pages of a prompt that is computed in chunks between `cuts`, each beside the prompts of others; and what is
    likely after it."""
    pages = empty_pages(CONFIG, len(OWN_TABLE) + 8, DEVICE, DTYPE).fill_(float("nan"))
    runner = exact_runner(weights, pages, max_sequences=8)
    likely: TokenLogprobs | None = None
    for start, end in pairwise(cuts):
        spec = SampleSpec(LIKELY, 0) if end == len(PROMPT) else None
        own = ChunkPlan(0, start, PROMPT[start:end], OWN_TABLE[: num_pages_for(end)], spec)
        others = [other_prompt(number) for number in range(num_others)]
        result = runner.run(StepPlan(0, (*others[: num_others // 2], own, *others[num_others // 2 :])))
        likely = result.logprobs.get(0)
    assert likely is not None
    return pages[: len(OWN_TABLE)].nan_to_num(), likely


@pytest.mark.parametrize(
    ("cuts", "num_others"),
    [
        pytest.param((0, 37), 3, marks=pytest.mark.long),
        pytest.param((0, 1, 17, 18, 37), 0, marks=pytest.mark.long),
        ((0, 16, 37), 3),
    ],
    ids=["beside", "cut", "both"],
)
def test_a_prompt_is_the_same_to_the_bit_however_it_is_cut_and_beside_whatever(
    weights: Weights, cuts: tuple[int, ...], num_others: int
) -> None:
    whole, likely = prefilled(weights, (0, 37), 0)
    found, found_likely = prefilled(weights, cuts, num_others)
    assert torch.equal(found, whole)
    assert found_likely == likely


@pytest.mark.long
def test_a_score_of_a_prompt_is_the_same_to_the_bit_beside_others(weights: Weights) -> None:
    chunk = ChunkPlan(0, 0, PROMPT, OWN_TABLE, SampleSpec(GREEDY, 0), ScoreSpec(PROMPT[1:], num_top=2))
    alone, together = (
        exact_runner(weights, max_sequences=8).run(StepPlan(0, (*others, chunk))).prompt_logprobs[0]
        for others in ((), tuple(other_prompt(number) for number in range(5)))
    )
    assert alone == together


@pytest.mark.long
def test_tokens_are_those_of_the_cpu_path(weights: Weights) -> None:
    """In fp32, where both are right to more digits than the choice needs."""
    pages = empty_pages(CONFIG, NUM_PAGES, DEVICE, torch.float32).fill_(float("nan"))
    found, expected = (Conversation(runner, PROMPTS) for runner in (exact_runner(weights, pages), GreedyOnCpu(weights)))
    for lengths in SCHEDULE:
        assert found.step([GREEDY] * 3, lengths) == expected.step([GREEDY] * 3, lengths)


@pytest.mark.long
def test_replayed_decodes_sample_what_steps_of_their_own_sample(weights: Weights) -> None:
    runner = exact_runner(weights)
    runner.capture_graphs(run_again if IS_INTERPRETED else cuda_graph_capture())
    expected, found = Conversation(exact_runner(weights), PROMPTS), Conversation(runner, PROMPTS)
    for lengths in [*SCHEDULE, (1, 0, 1), (0, 1, 0)]:
        assert found.step([GREEDY, WARM, FILTERED], lengths) == expected.step([GREEDY, WARM, FILTERED], lengths)


def test_warming_up_launches_exact_products_and_none_of_the_library(
    weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first prompt would wait for the compiler."""
    names: list[str] = []
    launched = KERNEL_TYPE.run

    def counted(kernel: Any, *args: object, **kwargs: object) -> object:
        names.append(kernel.fn.__name__)
        return launched(kernel, *args, **kwargs)

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a product of the library")

    monkeypatch.setattr(KERNEL_TYPE, "run", counted)
    monkeypatch.setattr(torch, "mm", refused)
    monkeypatch.setattr(torch, "addmm", refused)
    exact_runner(weights).warm_up()
    # a prompt and a decode, each with its logits; on a GPU the graphs come on top
    assert names.count("exact_linear_kernel") >= 2 * (4 * CONFIG.num_layers + 1)

"""Steps launched before the tokens of the step before are on the host: the same tokens as one step after the other."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from tests.kernels.triton_cases.case_runner import CONFIG, GREEDY, PROMPTS, WARM, random_weights, triton_runner
from tests.kernels.triton_cases.support import IS_INTERPRETED

from weir.core.errors import InternalError
from weir.core.sampling import SamplingParams
from weir.engine.plan import SAMPLED_BEFORE, ChunkPlan, SampleSpec, StepPlan, StepResult
from weir.kv.geometry import num_pages_for
from weir.model.torch.weights import Weights
from weir.model.triton.graphs import cuda_graph_capture

PARAMS = [GREEDY, WARM, SamplingParams(temperature=0.9, top_k=20, top_p=0.8, seed=5, logprobs=2)]
TABLES = [(3, 0, 5, 7), (1, 9, 2), (8, 6, 4, 11)]
NUM_STEPS = 3


@pytest.fixture(scope="module")
def weights() -> Weights:
    torch.manual_seed(0)
    return random_weights(CONFIG)


@pytest.fixture(scope="module")
def expected(weights: Weights) -> list[StepResult]:
    """One step after the other."""
    runner = triton_runner(weights)
    results = [runner.run(prompts_step())]
    for index in range(NUM_STEPS):
        token_ids = [results[-1].token_ids[slot] for slot in range(3)]
        results.append(runner.run(decodes_step(index, token_ids)))
    return results


def prompts_step(slots: Sequence[int] = (0, 1, 2)) -> StepPlan:
    return StepPlan(
        1,
        tuple(
            ChunkPlan(slot, 0, tuple(prompt), TABLES[slot][: num_pages_for(len(prompt))], SampleSpec(PARAMS[slot], 0))
            for slot, prompt in enumerate(PROMPTS)
            if slot in slots
        ),
    )


def decodes_step(index: int, token_ids: Sequence[int], slots: Sequence[int] = (0, 1, 2)) -> StepPlan:
    """Reads the token of output `index` of each slot, and samples the next."""
    chunks = []
    for slot, token_id in zip(slots, token_ids, strict=True):
        start = len(PROMPTS[slot]) + index
        table = TABLES[slot][: num_pages_for(start + 1)]
        chunks.append(ChunkPlan(slot, start, (token_id,), table, SampleSpec(PARAMS[slot], index + 1)))
    return StepPlan(index + 2, tuple(chunks))


@pytest.mark.parametrize("has_graphs", [False, pytest.param(True, marks=pytest.mark.long)])
def test_steps_that_are_launched_ahead_sample_the_same_tokens(
    weights: Weights, expected: list[StepResult], has_graphs: bool
) -> None:
    runner = triton_runner(weights)
    if has_graphs:
        runner.capture_graphs((lambda step: step) if IS_INTERPRETED else cuda_graph_capture())
    waiting = runner.launch(prompts_step())
    found = []
    for index in range(NUM_STEPS):
        ahead = runner.launch(decodes_step(index, [SAMPLED_BEFORE] * 3))
        found.append(waiting())
        waiting = ahead
    found.append(waiting())
    assert [result.token_ids for result in found] == [result.token_ids for result in expected]
    assert [set(result.logprobs) for result in found] == [{2}] * len(found)
    assert len({token_id for result in found for token_id in result.token_ids.values()}) > 4


def test_who_is_left_out_of_the_step_ahead_changes_nobody_elses_token(
    weights: Weights, expected: list[StepResult]
) -> None:
    runner = triton_runner(weights)
    first = runner.launch(prompts_step())
    second = runner.launch(decodes_step(0, [SAMPLED_BEFORE] * 2, slots=(2, 1)))
    first()
    third = runner.launch(decodes_step(1, [SAMPLED_BEFORE], slots=(1,)))
    assert second().token_ids == {slot: expected[1].token_ids[slot] for slot in (1, 2)}
    assert third().token_ids == {1: expected[2].token_ids[1]}


def test_a_slot_that_the_step_before_has_not_sampled_is_named(weights: Weights) -> None:
    runner = triton_runner(weights)
    runner.run(prompts_step(slots=(0, 1)))
    with pytest.raises(InternalError, match=r"slots \[2\] go on from tokens that the step before has not sampled"):
        runner.launch(decodes_step(0, [SAMPLED_BEFORE] * 3))


def test_a_step_that_fails_takes_the_one_ahead_of_it_with_it(weights: Weights) -> None:
    runner = triton_runner(weights)  # its pages are no numbers until they are written
    with np.errstate(all="ignore"):
        broken = runner.launch(decodes_step(3, [1], slots=(0,)))
        ahead = runner.launch(decodes_step(4, [SAMPLED_BEFORE], slots=(0,)))
    for step in (broken, ahead):
        with pytest.raises(InternalError, match="logits"):
            step()

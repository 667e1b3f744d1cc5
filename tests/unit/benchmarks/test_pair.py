"""Prefill and decode in two processes over one memory that neither owns."""

import random

import pytest
from tests.unit.benchmarks.host_pair import VOCAB_SIZE, HostKind

from benchmarks.gpu.pair.run import PairFailed, PairLoad, run_pair
from weir.core.sampling import SamplingParams
from weir.testing.runner import reference_tokens


def _prompts(count: int) -> tuple[tuple[int, ...], ...]:
    source = random.Random(7)
    return tuple(tuple(source.randrange(VOCAB_SIZE) for _ in range(source.randrange(1, 90))) for _ in range(count))


def test_the_tokens_are_those_of_one_process_and_every_page_comes_back() -> None:
    load = PairLoad(_prompts(12), num_output_tokens=20, num_pages=400, chunk_tokens=32)
    result = run_pair(HostKind(), load)
    greedy = SamplingParams(temperature=0.0)
    expected = {number: reference_tokens(prompt, greedy, 20, VOCAB_SIZE) for number, prompt in enumerate(load.prompts)}
    assert result.token_ids == {number: list(token_ids) for number, token_ids in expected.items()}
    assert len(result.hand_off_s) == len(load.prompts)
    assert result.num_free_pages_at_end == load.num_pages


def test_a_worker_that_dies_ends_the_run_and_is_named() -> None:
    load = PairLoad(_prompts(4), num_output_tokens=8, num_pages=200, timeout_s=20.0)
    with pytest.raises(PairFailed, match="the prefill worker has died"):
        run_pair(HostKind(dies_at_step=1), load)

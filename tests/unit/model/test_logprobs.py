"""Log-probabilities are those of the model's own logits, whatever sampling's parameters make of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.model.reference_sampler import Logits, log_softmax

from weir.core.sampling import SamplingParams, TokenLogprobs
from weir.engine.plan import SampleSpec, ScoreSpec, TokenHistory
from weir.model.rows import SampledRow, ScoredRows
from weir.model.sampler import prompt_logprobs, sample_step, scan_of, token_logprobs


def normal_row(vocab_size: int, seed: int = 0) -> Logits:
    return np.random.default_rng(seed).normal(0, 3, (1, vocab_size)).astype(np.float32)


def check(found: TokenLogprobs, logits: Logits, token_id: int, num_top: int) -> None:
    expected = log_softmax(logits)
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    assert found.token_id == token_id
    assert found.logprob == pytest.approx(expected[token_id], abs=1e-5)
    assert found.rank == 1 + int((logits > logits[token_id]).sum())
    assert [token for token, _ in found.top] == order[:num_top]
    assert [logprob for _, logprob in found.top] == pytest.approx([expected[t] for t in order[:num_top]], abs=1e-5)


@settings(deadline=None)
@given(seed=st.integers(0, 1000), vocab_size=st.sampled_from([3, 300, 6000]), num_top=st.integers(0, 20))
def test_the_sampled_token_and_the_most_likely_ones_have_logprobs(seed: int, vocab_size: int, num_top: int) -> None:
    logits = normal_row(vocab_size, seed)
    result = sample_step(
        scan_of(logits), [SampledRow(7, 0, SampleSpec(SamplingParams(seed=seed, logprobs=num_top), 0))]
    )
    check(result.logprobs[7], logits[0], result.token_ids[7], num_top)


def test_bias_penalties_and_temperature_do_not_change_logprobs() -> None:
    logits = normal_row(300)
    params = SamplingParams(0.2, top_k=3, logit_bias=((299, 100.0),), presence_penalty=2.0, logprobs=5)
    history = TokenHistory(np.array([1, 2, 3], np.int32), 1)
    result = sample_step(scan_of(logits), [SampledRow(0, 0, SampleSpec(params, 0, history=history))])
    assert result.token_ids == {0: 299}
    check(result.logprobs[0], logits[0], 299, 5)


def test_a_row_whose_parameters_do_not_ask_gets_no_logprobs() -> None:
    logits = np.concatenate([normal_row(300, 1), normal_row(300, 2)])
    quiet, asking = SampleSpec(SamplingParams(0.0), 0), SampleSpec(SamplingParams(0.0, logprobs=0), 0)
    result = sample_step(scan_of(logits), [SampledRow(4, 0, quiet), SampledRow(5, 1, asking)])
    assert set(result.token_ids) == {4, 5}
    assert set(result.logprobs) == {5}
    assert result.logprobs[5].top == ()


def test_each_row_has_a_token_whose_logprob_is_asked_for() -> None:
    logits = np.concatenate([normal_row(300, seed) for seed in range(3)])
    for row, found in enumerate(token_logprobs(logits, (9, 200, 0), 2)):
        check(found, logits[row], (9, 200, 0)[row], 2)


@pytest.mark.parametrize("num_tokens", [1, 64, 65, 200])
def test_the_logits_of_a_long_chunk_are_asked_for_in_slices_of_bounded_size(num_tokens: int) -> None:
    asked: list[range] = []

    def logits_of(rows: range) -> Logits:
        asked.append(rows)
        return np.concatenate([normal_row(300, row) for row in rows])

    scored = ScoredRows(3, 7, ScoreSpec(tuple(range(num_tokens)), 1))
    found = prompt_logprobs(scored, logits_of)
    assert [row for rows in asked for row in rows] == list(range(7, 7 + num_tokens))
    assert max(len(rows) for rows in asked) <= 64
    for index, logprobs in enumerate(found):
        check(logprobs, normal_row(300, 7 + index)[0], index, 1)

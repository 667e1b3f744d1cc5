"""Sampled tokens follow the distribution that parameters say; nothing but their own row and history decides."""

import math
from dataclasses import fields, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.model.reference_sampler import Logits, adjusted_logits, kept_tokens

from weir.core.errors import InternalError
from weir.core.sampling import SamplingParams
from weir.engine.plan import SampleSpec, TokenHistory
from weir.model.sampler import sample_tokens, scan_of, uniform

VOCAB_SIZE = 30

seeds = st.integers(0, 2**64 - 1)
indices = st.integers(0, 2**31)
logit_rows = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40).map(
    lambda values: np.array(values, dtype=np.float32)
)
FILTERS = {
    "temperature": st.one_of(st.just(0.0), st.floats(0.01, 10)),
    "top_k": st.integers(0, 50),
    "top_p": st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
    "min_p": st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
    "seed": seeds,
}
ADJUSTMENTS = {
    "repetition_penalty": st.one_of(st.just(1.0), st.floats(0.5, 2.0)),
    "presence_penalty": st.one_of(st.just(0.0), st.floats(-2.0, 2.0)),
    "frequency_penalty": st.one_of(st.just(0.0), st.floats(-2.0, 2.0)),
    "logit_bias": st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.floats(-100, 100), max_size=4).map(
        lambda bias: tuple(sorted(bias.items()))
    ),
}
GRAMMARS = {"grammar": st.just(None)}
"""What counts of one is its mask."""
REPORTS = {"logprobs": st.none() | st.integers(0, 3), "prompt_logprobs": st.none() | st.integers(0, 3)}
"""What changes no token."""
params_of_any_kind = st.builds(SamplingParams, **FILTERS, **ADJUSTMENTS, **REPORTS)
token_lists = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=20)


def test_every_sampling_parameter_is_tried_here() -> None:
    """One that is new belongs into one of these, and into `reference_sampler`."""
    assert {**FILTERS, **ADJUSTMENTS, **REPORTS, **GRAMMARS}.keys() == {field.name for field in fields(SamplingParams)}


def normal_rows(num_rows: int, vocab_size: int = VOCAB_SIZE, *, seed: int = 0, spread: float = 3.0) -> Logits:
    return np.random.default_rng(seed).normal(0, spread, (num_rows, vocab_size)).astype(np.float32)


def sample_rows(logits: Logits, specs: list[SampleSpec]) -> list[int]:
    return sample_tokens(scan_of(logits), specs)


def sample(logits: Logits, params: SamplingParams, output_index: int) -> int:
    """One token of one row [vocabulary] without bias, penalties and mask."""
    return sample_rows(logits[None], [SampleSpec(params, output_index)])[0]


def spec_of(
    params: SamplingParams, index: int, prompt: list[int], output: list[int], masked: tuple[int, ...] = ()
) -> SampleSpec:
    history = TokenHistory(np.array([*prompt, *output], np.int32), len(prompt))
    return SampleSpec(params, index, masked, history if params.has_penalties else None)


def may_be_sampled(token_id: int, values: list[float], params: SamplingParams) -> bool:
    """By the definition, with limits moved by what float32 may lose: a tie with a limit may fall on either side."""
    largest = max(abs(value) for value in values if math.isfinite(value))
    slack = 1e-5 * max(1.0, largest / max(params.temperature, 1e-5))
    top_p, min_p = min(1.0, params.top_p * (1 + slack) + 1e-6), params.min_p * (1 - slack)
    highest = sorted(values, reverse=True)
    if params.is_greedy:
        return values[token_id] >= highest[0] - 1e-4
    if params.top_k:
        values = [
            value if value >= highest[min(params.top_k, len(values)) - 1] - 1e-4 else -math.inf for value in values
        ]
    return token_id in kept_tokens(values, replace(params, top_k=0, top_p=top_p, min_p=min_p))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1.0, seed=1),
        SamplingParams(0.5, seed=2),
        SamplingParams(2.0, top_k=4, seed=3),
        SamplingParams(1.0, top_p=0.7, seed=4),
        SamplingParams(1.3, top_k=5, top_p=0.8, seed=2**64 - 1),
        SamplingParams(1.5, min_p=0.2, seed=5),
        SamplingParams(1.5, top_k=7, top_p=0.95, min_p=0.1, seed=6),
    ],
    ids=str,
)
def test_sampled_tokens_follow_the_distribution(params: SamplingParams) -> None:
    logits = np.random.default_rng(0).normal(0, 1.5, 9).astype(np.float32)
    count = 4000
    sampled = [sample(logits, params, index) for index in range(count)]
    found = np.bincount(sampled, minlength=len(logits))
    kept = kept_tokens(logits.tolist(), params)
    expected = np.array([kept.get(token, 0.0) * count for token in range(len(logits))])
    assert found[expected == 0].sum() == 0
    chi_square = float(((found - expected)[expected > 0] ** 2 / expected[expected > 0]).sum())
    # 8 degrees of freedom at most: more than 30 happens once in 5,000 seeds, and the seeds are fixed
    assert chi_square < 30


@settings(deadline=None)
@given(logits=logit_rows, params=st.builds(SamplingParams, **FILTERS), index=indices)
def test_only_tokens_inside_top_k_top_p_and_min_p_are_sampled(
    logits: Logits, params: SamplingParams, index: int
) -> None:
    assert may_be_sampled(sample(logits, params, index), logits.tolist(), params)


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    params=params_of_any_kind,
    prompt=token_lists,
    output=token_lists,
    masked=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=5, unique=True).map(tuple),
    index=indices,
)
def test_bias_penalties_and_mask_change_the_logits_as_the_definition_says(
    seed: int, params: SamplingParams, prompt: list[int], output: list[int], masked: tuple[int, ...], index: int
) -> None:
    logits = normal_rows(1, seed=seed)
    before = logits.copy()
    (token_id,) = sample_rows(logits, [spec_of(params, index, prompt, output, masked)])
    values = adjusted_logits(logits[0], params, prompt, output, masked)
    assert may_be_sampled(token_id, values, params)
    assert token_id not in masked
    np.testing.assert_array_equal(logits, before)


class Allowed(NamedTuple):
    """The mask of a grammar."""

    token_ids: frozenset[int]

    def allowed(self) -> npt.NDArray[np.uint32]:
        return np.array([sum(1 << token_id for token_id in self.token_ids)], np.uint32)


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    params=params_of_any_kind,
    output=token_lists,
    masked=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=5, unique=True).map(tuple),
    allowed=st.frozensets(st.integers(0, VOCAB_SIZE - 1), min_size=1),
    index=indices,
)
def test_with_a_grammar_only_what_it_allows_is_sampled_and_of_that_nothing_masked_if_there_is_more(
    seed: int,
    params: SamplingParams,
    output: list[int],
    masked: tuple[int, ...],
    allowed: frozenset[int],
    index: int,
) -> None:
    logits = normal_rows(1, seed=seed)
    spec = spec_of(params, index, [], output, masked)._replace(mask=Allowed(allowed))
    (token_id,) = sample_rows(logits, [spec])
    left = allowed - set(masked) or allowed
    assert token_id in left
    ruled_out = [other for other in range(VOCAB_SIZE) if other not in left]
    assert may_be_sampled(token_id, adjusted_logits(logits[0], params, [], output, ruled_out), params)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(0.0), 0),
        (SamplingParams(0.0, repetition_penalty=1.2), 2),
        (SamplingParams(0.0, presence_penalty=1.0), 1),
        (SamplingParams(0.0, frequency_penalty=0.9), 1),
        (SamplingParams(0.0, frequency_penalty=0.4), 0),
        (SamplingParams(0.0, logit_bias=((3, 100.0),)), 3),
        (SamplingParams(0.0, logit_bias=((0, -100.0),), repetition_penalty=1.2), 2),
    ],
    ids=str,
)
def test_greedy_sampling_sees_bias_and_penalties(params: SamplingParams, expected: int) -> None:
    logits = np.array([[5.0, 4.5, 4.4, -1.0]], np.float32)
    assert sample_rows(logits, [spec_of(params, 0, prompt=[1], output=[0])]) == [expected]


def test_only_the_repetition_penalty_looks_at_the_prompt() -> None:
    logits = np.array([[5.0, 4.5, -1.0]], np.float32)
    for params in (SamplingParams(0.0, presence_penalty=2.0), SamplingParams(0.0, frequency_penalty=2.0)):
        assert sample_rows(logits, [spec_of(params, 0, prompt=[0], output=[])]) == [0]
    repetition = SamplingParams(0.0, repetition_penalty=2.0)
    assert sample_rows(logits, [spec_of(repetition, 0, prompt=[0], output=[])]) == [1]
    negative = np.array([[-1.0, -1.5, -9.0]], np.float32)
    assert sample_rows(negative, [spec_of(repetition, 0, prompt=[0], output=[])]) == [1]


def test_sampling_with_penalties_without_its_history_is_a_defect() -> None:
    with pytest.raises(InternalError, match="without the tokens before it"):
        sample_rows(normal_rows(1), [SampleSpec(SamplingParams(presence_penalty=1.0), 0)])


def test_where_every_token_is_masked_one_is_sampled_still() -> None:
    spec = SampleSpec(SamplingParams(1.0), 0, masked_token_ids=(0, 1))
    assert sample_rows(np.array([[1.0, 2.0]], np.float32), [spec])[0] in (0, 1)


@settings(deadline=None)
@given(
    rows=st.lists(st.tuples(params_of_any_kind, indices, token_lists, token_lists), min_size=1, max_size=8),
    data=st.data(),
)
def test_a_rows_token_does_not_depend_on_the_batch(
    rows: list[tuple[SamplingParams, int, list[int], list[int]]], data: st.DataObject
) -> None:
    logits = normal_rows(len(rows), seed=len(rows))
    specs = [spec_of(*row) for row in rows]
    alone = [sample_rows(logits[i : i + 1], [spec])[0] for i, spec in enumerate(specs)]
    order = data.draw(st.permutations(range(len(rows))))
    assert sample_rows(logits[order], [specs[i] for i in order]) == [alone[i] for i in order]


@given(seed=seeds, index=indices)
def test_the_random_numbers_are_those_of_numpys_philox(seed: int, index: int) -> None:
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, index], np.uint64)))
    assert uniform(seed, index) == generator.random()


def test_the_random_numbers_are_these() -> None:
    # Other workers, and later versions, must continue a sequence that this one began.
    numbers = [uniform(0, 0), uniform(0, 1), uniform(1, 0), uniform(2**64 - 1, 5)]
    assert numbers == [0.011546754286331562, 0.8133540609793564, 0.3035680343067586, 0.05541565898515444]


def ordered_sample(logits: Logits, size: int, number: float) -> tuple[int, float]:
    """The token at `number` of the cumulative distribution of the `size` most likely, and how near a border that is."""
    order = np.argsort(-logits, kind="stable")[:size]
    cumulative = np.exp(logits[order].astype(np.float64) - logits.max()).cumsum()
    cumulative /= cumulative[-1]
    place = int(np.searchsorted(cumulative, number, side="right"))
    return int(order[place]), float(np.abs(cumulative - number).min())


def size_of_nucleus(logits: Logits, top_p: float) -> int:
    weights = np.sort(np.exp(logits.astype(np.float64) - logits.max()))[::-1]
    return int((weights.cumsum() < top_p * weights.sum()).sum()) + 1


@pytest.mark.parametrize("vocab_size", [255, 256, 20_001])
@pytest.mark.parametrize("spread", [0.1, 0.5, 3.0], ids=["flat", "broad", "peaked"])
def test_filters_of_a_large_vocabulary_are_those_of_sorting_it_all(spread: float, vocab_size: int) -> None:
    (logits,) = normal_rows(1, vocab_size, seed=3, spread=spread)
    sizes = {
        SamplingParams(top_p=0.9, seed=9): size_of_nucleus(logits, 0.9),
        SamplingParams(top_k=40, seed=9): 40,
        SamplingParams(top_k=200, seed=9): 200,
        SamplingParams(min_p=0.03, seed=9): int((logits >= logits.max() + math.log(0.03)).sum()),
        SamplingParams(top_k=vocab_size, top_p=0.99999, seed=9): size_of_nucleus(logits, 0.99999),
    }
    # the top 200 are the whole of which top_p is a part, also those less likely than min_p
    best = np.sort(logits)[::-1][:200]
    size = min(size_of_nucleus(best, 0.9), int((best >= best[0] + math.log(0.05)).sum()))
    sizes[SamplingParams(top_k=200, top_p=0.9, min_p=0.05, seed=9)] = size
    for params, size in sizes.items():
        for index in range(40):
            expected, distance = ordered_sample(logits, size, uniform(9, index))
            assert sample(logits, params, index) == expected or distance < 1e-5


@pytest.mark.parametrize("spread", [0.1, 3.0], ids=["flat", "peaked"])
def test_without_filters_the_distribution_is_inverted_in_the_order_of_ids(spread: float) -> None:
    (logits,) = normal_rows(1, 20_001, seed=4, spread=spread)
    cumulative = np.exp(logits.astype(np.float64) - logits.max()).cumsum()
    cumulative /= cumulative[-1]
    for index in range(100):
        number = uniform(7, index)
        is_near_border = float(np.abs(cumulative - number).min()) < 1e-7
        assert sample(logits, SamplingParams(seed=7), index) == np.searchsorted(cumulative, number) or is_near_border


@pytest.mark.parametrize("params", [SamplingParams(1.0), SamplingParams(1.0, top_p=0.999), SamplingParams(top_k=3)])
def test_the_greatest_uniform_number_samples_the_last_token_with_any_weight(
    monkeypatch: pytest.MonkeyPatch, params: SamplingParams
) -> None:
    monkeypatch.setattr("weir.model.sampler.uniform", lambda seed, index: 1.0)
    logits = np.array([0.0, 1.0, -1e30, -1e30], dtype=np.float32)
    assert sample(logits, params, 0) == (1 if params == SamplingParams(1.0) else 0)


def test_of_equal_logits_the_lower_id_is_kept() -> None:
    logits = np.zeros(600, np.float32)
    logits[:300] = -0.0  # equal to zero
    sampled = {sample(logits, SamplingParams(top_k=3, seed=1), index) for index in range(50)}
    assert sampled == {0, 1, 2}
    assert sample(logits, SamplingParams(0.0), 0) == 0


@pytest.mark.parametrize("temperature", [5e-324, 9e-6, 1e-5])
def test_sampling_at_a_low_temperature_is_greedy(temperature: float) -> None:
    logits = np.random.default_rng(1).normal(0, 3, 200).astype(np.float32)
    params = SamplingParams(temperature)
    assert {sample(logits, params, index) for index in range(20)} == {int(logits.argmax())}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 299], ids=["whole group", "rest"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_row_that_is_not_a_number_spoils_the_step(bad: float, place: int, temperature: float) -> None:
    logits: npt.NDArray[np.float32] = np.zeros((3, 300), np.float32)
    logits[1, place] = bad
    specs = [SampleSpec(SamplingParams(temperature), 0)] * 3
    with pytest.raises(InternalError, match=r"1 of 3 rows: \[1\]"):
        sample_rows(logits, specs)

"""A fit finds the coefficients that made the steps, through noise and hiccups, and says when it cannot."""

import random

import numpy as np
import pytest

from weir.core.cost import PromptChunk, StepCost
from weir.core.cost_fit import CostSample, fit_cost, try_fit_cost

COST = StepCost(5.0, 0.02, 1e-6, 0.05, 5e-5)


def samples(cost: StepCost = COST, number: int = 400, noise: float = 0.0, seed: int = 1) -> list[CostSample]:
    chance, made = random.Random(seed), []
    for index in range(number):
        num_prefill = chance.choice([64, 512, 2048]) if index % 2 else 0
        num_before = chance.choice([0, 1000, 6000])
        num_decodes = chance.randint(1, 128)
        num_context = num_decodes * chance.randint(100, 4000)
        chunks = [PromptChunk(num_prefill, num_before)] if num_prefill else []
        duration_ms = cost.step_ms(chunks, num_decodes, num_context) * (1 + chance.gauss(0, noise))
        pairs = num_prefill * (num_before + num_prefill / 2)
        made.append(CostSample(num_prefill, pairs, num_decodes, num_context, duration_ms))
    return made


def coefficients(cost: StepCost) -> list[float]:
    return [
        cost.base_ms,
        cost.prefill_token_ms,
        cost.prefill_pair_ms,
        cost.decode_sequence_ms,
        cost.context_token_ms,
    ]


def test_without_noise_the_coefficients_are_found() -> None:
    fit = fit_cost(samples())
    assert coefficients(fit.cost) == pytest.approx(coefficients(COST), rel=1e-6)
    assert fit.r2 == pytest.approx(1.0)
    assert fit.error_p95 == pytest.approx(0.0, abs=1e-9)


def test_steps_that_hiccuped_are_left_out() -> None:
    made = samples(noise=0.02)
    slow = [sample._replace(duration_ms=sample.duration_ms * 8) for sample in made[::20]]
    fit = fit_cost([*made[: len(made) // 2], *slow, *made[len(made) // 2 :]])
    clean = fit_cost(made)
    assert fit.num_left_out >= len(slow)
    assert coefficients(fit.cost)[:2] == pytest.approx(coefficients(clean.cost)[:2], rel=0.05)
    assert fit.error_p50 == pytest.approx(0.0, abs=0.02)


def test_the_mean_cost_has_the_slow_steps_that_the_usual_one_leaves_out() -> None:
    """A quarter of the steps takes four times as long, of whatever kind: 1.75 times in the mean."""
    chance = random.Random(7)
    made = [s._replace(duration_ms=s.duration_ms * chance.choice((1, 1, 1, 4))) for s in samples(number=8000)]
    fit = fit_cost(made)
    for has_prompts in (False, True):
        kind = [s for s in made if (s.num_prefill_tokens > 0) is has_prompts]
        told = sum(
            fit.mean_cost.base_ms
            + fit.mean_cost.prefill_token_ms * s.num_prefill_tokens
            + fit.mean_cost.prefill_pair_ms * s.num_prefill_pairs
            + fit.mean_cost.decode_sequence_ms * s.num_decodes
            + fit.mean_cost.context_token_ms * s.num_context_tokens
            for s in kind
        )
        assert told == pytest.approx(sum(s.duration_ms for s in kind), rel=0.03)
    assert fit.cost.prefill_token_ms == pytest.approx(COST.prefill_token_ms, rel=0.01)


def test_a_coefficient_that_would_be_negative_is_zero_and_the_rest_is_best_without_it() -> None:
    made = [s._replace(duration_ms=50.0 - 1e-5 * s.num_context_tokens) for s in samples()]
    fit = fit_cost(made)
    found = np.array(coefficients(fit.cost))
    assert (found >= 0).all()
    assert found[4] == 0.0
    table = np.array(made)
    terms = np.column_stack([np.ones(len(table)), table[:, :4]]) / table[:, 4:5]
    loss = float(((terms @ found - 1) ** 2).sum())
    for index in range(5):
        for change in (-1e-3, 1e-3):
            other = found.copy()
            other[index] = max(0.0, other[index] + change * max(other[index], 1e-4))
            assert float(((terms @ other - 1) ** 2).sum()) >= loss - 1e-9 or fit.num_left_out > 0


def test_steps_that_are_too_few_or_too_much_alike_give_no_cost() -> None:
    made = samples()
    assert try_fit_cost(made) is not None
    assert try_fit_cost(made[:40]) is None
    decodes = [sample for sample in made if not sample.num_prefill_tokens]
    prompts = [sample._replace(num_decodes=0, num_context_tokens=0) for sample in made if sample.num_prefill_tokens]
    assert try_fit_cost(decodes) is None
    assert try_fit_cost(prompts) is None
    assert try_fit_cost(prompts, must_decode=False) is not None
    alike = [sample._replace(num_decodes=3) for sample in made]
    assert try_fit_cost(alike) is None


@pytest.mark.parametrize("contention", [0.0, 0.4, 1.1])
def test_the_mean_cost_is_that_beside_nobody_and_the_contention_what_each_other_worker_adds(contention: float) -> None:
    """Prompts of one worker run beside others more often than its decodes do."""
    chance, made = random.Random(11), []
    for sample in samples(number=4000, noise=0.1, seed=5):
        mean_others = min(3.0, chance.choice((0, 0.5, 1)) + (sample.num_prefill_tokens > 0) * chance.choice((0, 1, 2)))
        duration_ms = sample.duration_ms * (1 + contention * mean_others)
        made.append(sample._replace(duration_ms=duration_ms, mean_others=mean_others))
    fit = fit_cost(made)
    assert fit.contention == pytest.approx(contention, rel=0.03, abs=0.01)
    assert fit.mean_cost.base_ms == pytest.approx(COST.base_ms, rel=0.1)
    assert fit.mean_cost.prefill_token_ms == pytest.approx(COST.prefill_token_ms, rel=0.05)


def test_without_others_there_is_no_contention() -> None:
    assert fit_cost(samples(noise=0.1)).contention == 0.0


@pytest.mark.parametrize("made", [samples()[:4], [*samples()[:5], CostSample(0, 0.0, 1, 5, 0.0)]])
def test_what_cannot_be_fitted_is_refused(made: list[CostSample]) -> None:
    with pytest.raises(ValueError, match="at least 5 are needed, each with a duration above 0"):
        fit_cost(made)

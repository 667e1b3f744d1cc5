"""The loss, the network that is trained with it, and what its file keeps of it."""

import itertools
import math

import numpy as np
import pytest
import torch
from tests.unit.predictors.words import conversation, prompts_and_lengths, samples_of, word_table

from weir.policy.predictors.features import ANSWER_FEATURES, PromptFeatures
from weir.training.make import train_predictor
from weir.training.ranking import (
    RankingSettings,
    TrainedRanker,
    compress,
    knots_of,
    labels_of,
    listmle_loss,
    train_ranker,
)
from weir.training.samples import Samples, tau

TABLE = word_table()
QUICK = RankingSettings(num_members=2, num_epochs=12)


@pytest.fixture(scope="module")
def trained() -> TrainedRanker:
    return train_ranker(samples_of(TABLE, 400, noise=0.3), QUICK)


def test_the_gradient_of_listmle_is_that_of_numerical_differences() -> None:
    generator = torch.Generator().manual_seed(5)
    scores = torch.randn(9, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 5, (9,), generator=generator)
    listmle_loss(scores, labels).backward()  # type: ignore[no-untyped-call]
    assert scores.grad is not None
    step = 1e-6
    for index in range(9):
        moved = torch.zeros(9, dtype=torch.float64)
        moved[index] = step
        with torch.no_grad():
            slope = (listmle_loss(scores + moved, labels) - listmle_loss(scores - moved, labels)) / (2 * step)
        assert scores.grad[index].item() == pytest.approx(slope.item(), abs=1e-8)


def test_listmle_is_the_likelihood_of_the_order_under_plackett_luce() -> None:
    scores, labels = torch.tensor([0.3, -1.2, 2.0]), torch.tensor([2, 3, 1])
    order = [1, 0, 2]
    likelihood = 1.0
    for place in range(3):
        left = [math.exp(scores[item]) for item in order[place:]]
        likelihood *= left[0] / sum(left)
    assert listmle_loss(scores, labels).item() == pytest.approx(-math.log(likelihood) / 3, rel=1e-5)


def test_listmle_is_least_for_the_right_order() -> None:
    labels = torch.tensor([3, 2, 1, 0])
    losses = {
        order: listmle_loss(torch.tensor(order), labels).item() for order in itertools.permutations((1.0, 2, 3, 4))
    }
    assert min(losses, key=lambda order: losses[order]) == (4.0, 3, 2, 1)


def test_labels_are_buckets_of_ten_and_higher_is_shorter() -> None:
    labels = labels_of(torch.tensor([1, 2, 12, 8192, 9000]))
    assert labels[0] == labels[1] > labels[2] > labels[3]
    assert labels[3] == labels[4] == 0


def test_training_finds_what_there_is_to_find(trained: TrainedRanker) -> None:
    prompts, lengths = prompts_and_lengths(TABLE, 200, noise=0.3, seed=99)
    rows = PromptFeatures(TABLE).of(prompts)
    assert abs(tau(rows[:, 0], lengths)) < 0.15, "the prompt's length says nothing"
    found = tau(-trained.ranker.score(rows), lengths)
    assert found > 0.5
    assert trained.held_out_tau == pytest.approx(found, abs=0.12)


def test_where_there_is_nothing_to_find_the_held_out_tau_says_so() -> None:
    samples = samples_of(TABLE, 300, noise=0.3)
    mixed = Samples(samples.features, np.random.default_rng(0).permutation(samples.num_output_tokens))
    assert abs(train_ranker(mixed, QUICK).held_out_tau) < 0.15


def test_predicted_lengths_have_the_right_size(trained: TrainedRanker) -> None:
    prompts, lengths = prompts_and_lengths(TABLE, 300, noise=0.3, seed=7)
    predicted = trained.ranker.predict(PromptFeatures(TABLE).of(prompts)).output_tokens
    assert predicted.mean() == pytest.approx(lengths.mean(), rel=0.35)
    assert np.abs(predicted - lengths).mean() < 0.8 * np.abs(lengths.mean() - lengths).mean()


def test_training_twice_gives_the_same_network() -> None:
    samples = samples_of(TABLE, 120, noise=0.3)
    torch.manual_seed(1)
    one = train_ranker(samples, QUICK).ranker
    torch.manual_seed(2)
    other = train_ranker(samples, QUICK).ranker
    for name, array in one.arrays().items():
        np.testing.assert_array_equal(array, other.arrays()[name])


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="60 samples; a ranking network needs 100"):
        train_ranker(samples_of(TABLE, 60, noise=0.3))


def test_a_score_and_its_length_lead_to_each_other(trained: TrainedRanker) -> None:
    ranker = trained.ranker
    for tokens in (float(ranker.token_knots[0]), float(ranker.token_knots[-1]), float(ranker.token_knots.mean())):
        score = ranker.score_of(tokens)
        assert np.interp(score, ranker.score_knots, ranker.token_knots) == pytest.approx(tokens, rel=0.02)


def test_knots_fall_even_where_lengths_do_not() -> None:
    scores = np.arange(40, dtype=np.float32)
    lengths = np.concatenate([np.full(10, 50), np.full(10, 90), np.full(10, 20), np.full(10, 30)])
    score_knots, token_knots = knots_of(scores, lengths, 4)
    assert token_knots.tolist() == [70, 70, 25, 25]
    assert (np.diff(score_knots) > 0).all()


def test_knots_of_equal_scores_say_the_mean() -> None:
    score_knots, token_knots = knots_of(np.zeros(20, np.float32), np.arange(1, 21), 4)
    assert np.interp(0.0, score_knots, token_knots) > 1
    assert len(score_knots) == len(token_knots) == 2


def test_a_smaller_table_gives_nearly_the_same_scores() -> None:
    table = word_table(num_dims=64)
    ranker = train_ranker(samples_of(table, 300, noise=0.3), QUICK).ranker
    prompts, _ = prompts_and_lengths(table, 100, noise=0.3, seed=8)
    small_table, small = compress(table, ranker, 24)
    whole, reduced = (
        ranker.score(PromptFeatures(table).of(prompts)),
        small.score(PromptFeatures(small_table).of(prompts)),
    )
    assert small_table.num_dims == 24
    assert tau(whole, reduced) > 0.9
    same_table, same = compress(table, ranker, 64)
    assert same_table is table
    assert same is ranker


def test_a_forest_can_be_trained_instead() -> None:
    samples = samples_of(TABLE, 200, noise=0.3)
    assert train_predictor(TABLE, samples, "m", "forest").info.held_out_tau > 0.2


def test_a_predictor_trained_on_conversations_ranks_by_their_earlier_answers() -> None:
    """Words say nothing here: each conversation has a length of its own that its answers vary around."""
    source = np.random.default_rng(8)
    usual = np.exp(source.normal(4, 0.8, 300))
    answers = np.maximum(1, usual[:, None] * np.exp(0.2 * source.normal(size=(300, 3)))).astype(np.int64)
    prompts = [conversation(first, second) for first, second, _ in answers.tolist()]
    predictor = train_predictor(TABLE, Samples(PromptFeatures(TABLE).of(prompts), answers[:, 2]), "m", settings=QUICK)
    assert predictor.info.held_out_tau > 0.6
    short, long = predictor.predict([conversation(10, 12), conversation(300, 280)]).output_tokens
    assert 3 * short < long


def test_a_feature_that_no_sample_had_changes_no_score() -> None:
    """Nothing has trained its weights: here no sample was of a conversation, and the request is."""
    samples = samples_of(TABLE, 200, noise=0.3)
    ranker = train_ranker(samples, QUICK).ranker
    asked = samples.features[:20].copy()
    asked[:, ANSWER_FEATURES] = [math.log1p(9), math.log1p(900), math.log1p(400)]
    np.testing.assert_allclose(ranker.score(asked), ranker.score(samples.features[:20]), rtol=0, atol=1e-5)

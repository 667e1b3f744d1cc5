"""Answers are driven to their ends, each as if it were alone."""

import json
from pathlib import Path

import numpy as np
from tests.unit.predictors.words import prompts_and_lengths, word_table

from benchmarks.predictors.answers import Answer, AnswerLimits, Question, answer_with, write_answers
from benchmarks.predictors.data import DataSet
from benchmarks.predictors.measure import measure_group, scored_lengths
from weir.testing.runner import HashRunner
from weir.training.ranking import RankingSettings
from weir.training.samples import tau

QUICK = RankingSettings(num_members=2, least_steps=160, num_epochs=8)
STOPS = tuple(range(40))


def all_of(max_num_seqs: int) -> dict[tuple[int, int], tuple[int, bool]]:
    questions = [Question("s", i, seed, tuple(range(1, 3 + i))) for i in range(12) for seed in (0, 1)]
    limits = AnswerLimits(max_tokens=24, max_num_seqs=max_num_seqs, chunk_tokens=5)
    found: list[Answer] = []
    answer_with(HashRunner(200, 512), questions, limits, STOPS, 512, found.append)
    return {(answer.index, answer.seed): (answer.num_output_tokens, answer.is_cut) for answer in found}


def test_an_answer_does_not_depend_on_who_is_answered_beside_it() -> None:
    alone, together = all_of(1), all_of(7)
    assert alone == together
    assert len(alone) == 24


def test_answers_end_with_a_stop_token_or_are_cut() -> None:
    found = all_of(4).values()
    assert all(1 <= num <= 24 for num, _ in found)
    assert all(num == 24 for num, is_cut in found if is_cut)
    assert {is_cut for _, is_cut in found} == {True, False}


def test_lengths_are_kept_by_set_seed_and_prompt(tmp_path: Path) -> None:
    write_answers(
        tmp_path / "a.json", "m", AnswerLimits(), [Answer("s", 3, 1, 5, 17, False), Answer("s", 2, 0, 5, 9, True)]
    )
    content = json.loads((tmp_path / "a.json").read_text())
    assert content["lengths"] == {"s": {"0": {"2": 9}, "1": {"3": 17}}}
    assert (content["model"], content["max_tokens"]) == ("m", 512)


def word_set(num: int) -> DataSet:
    prompts, lengths = prompts_and_lengths(word_table(), num, noise=0.4)
    _, again = prompts_and_lengths(word_table(), num, noise=0.4)
    return DataSet("words", "m", [tuple(prompt) for prompt in prompts], lengths, again)


def test_the_measurement_sees_what_is_in_words_and_not_in_lengths() -> None:
    (result,) = measure_group([word_set(200)], word_table(), num_splits=2, settings=QUICK)
    assert abs(result.prompt_length.mean) < 0.3
    assert result.in_file.mean > 0.35
    assert result.embeddings.mean > result.signs.mean
    assert result.twice is not None
    assert result.twice.mean == 1.0, "the same noise was drawn twice"
    assert result.share_of_way is not None
    assert 0.2 < result.share_of_way < 1


def test_scores_for_the_simulator_rank_prompts_by_networks_that_have_not_seen_them() -> None:
    words = word_set(240)
    scored = scored_lengths(words, word_table(), num_parts=3, settings=QUICK)
    assert [row.num_output_tokens for row in scored] == words.num_output_tokens.tolist()
    assert tau(np.array([-row.score for row in scored]), words.num_output_tokens) > 0.3

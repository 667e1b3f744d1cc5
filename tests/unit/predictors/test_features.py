"""What a predictor sees of a prompt."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.predictors.words import FRAME, NUM_WORDS, PREFIX, SUFFIX, conversation, token_bytes, word_table

from weir.policy.predictors.features import ANSWER_FEATURES, NUM_PLAIN, Floats, PromptFeatures, earlier_answers
from weir.policy.predictors.token_table import SIGNS, ChatFrame, TokenTable, digest_of_tokens, make_token_table

TABLE = word_table()
FEATURES = PromptFeatures(TABLE)
QUESTION, LIST, WRITE, WORDS, FIVE, ZERO, CODE = 4, 5, 6, 7, 8, 9, 10


def features(*tokens: int) -> Floats:
    row: Floats = FEATURES.of([tokens])[0]
    return row


def sign(row: np.ndarray, name: str) -> float:
    return float(row[NUM_PLAIN + SIGNS.index(name)])


def test_what_the_chat_template_wrote_is_left_out() -> None:
    np.testing.assert_array_equal(features(*PREFIX, 20, 21, *SUFFIX), features(20, 21))


def test_a_prompt_that_is_all_template_counts_whole() -> None:
    assert features(*PREFIX, *SUFFIX)[0] == pytest.approx(math.log1p(3))


def test_signs_are_found_however_a_word_is_written() -> None:
    row = features(WRITE, LIST, 30, QUESTION)
    assert (sign(row, "write"), sign(row, "list"), sign(row, "essay")) == (1, 1, 0)
    assert sign(row, "?") == pytest.approx(math.log1p(1))
    assert row[1] == 1
    assert features(QUESTION, 30, 31, 32)[1] == 0, "it does not end with a question"
    assert sign(features(CODE), "```") > 0


def test_digits_are_read_as_numbers_and_a_unit_makes_one_a_wanted_length() -> None:
    row = features(WRITE, FIVE, ZERO, ZERO, WORDS, 30, FIVE)
    count, largest, asked = row[2:5]
    assert count == pytest.approx(math.log1p(2))
    assert largest == asked == pytest.approx(math.log1p(500))
    assert features(FIVE, ZERO, 30, WORDS)[4] == 0, "the number is not right before the unit"


def test_vectors_are_pooled_by_their_mean() -> None:
    expected = (TABLE.vectors[[20, 21, 22]] * TABLE.scales).mean(axis=0)
    np.testing.assert_allclose(features(20, 21, 22)[-TABLE.num_dims :], expected, rtol=1e-5)


def test_of_a_long_prompt_the_first_and_last_512_tokens_are_seen() -> None:
    edges = [20] * 512, [21] * 512
    row = features(*edges[0], *[40] * 5000, *edges[1])
    np.testing.assert_allclose(row[-TABLE.num_dims :], features(20, 21)[-TABLE.num_dims :], rtol=1e-4, atol=1e-6)
    assert row[0] == pytest.approx(math.log1p(6024))


def test_earlier_answers_of_a_conversation_are_counted_and_measured() -> None:
    number, last, mean = features(*conversation(7, 30))[ANSWER_FEATURES]
    assert (number, last) == (pytest.approx(math.log1p(2)), pytest.approx(math.log1p(30)))
    assert mean == pytest.approx((math.log1p(7) + math.log1p(30)) / 2)
    assert not features(*conversation())[ANSWER_FEATURES].any()


def test_an_answer_without_its_end_or_its_beginning_is_not_counted() -> None:
    assert earlier_answers([*FRAME.before_answer, 40, 40], FRAME) == []
    assert earlier_answers([40, 40, *FRAME.after_answer, *SUFFIX], FRAME) == []
    assert earlier_answers([FRAME.before_answer[0]] * 50, FRAME) == []


def test_a_template_of_unknown_turns_has_no_earlier_answers() -> None:
    assert earlier_answers(conversation(7), ChatFrame(PREFIX, SUFFIX)) == []


@given(st.lists(st.integers(0, 1500), max_size=12))
def test_earlier_answers_are_those_that_are_whole_in_the_last_4096_tokens(lengths: list[int]) -> None:
    prompt = conversation(*lengths)
    whole: list[int] = []
    num_tokens = len(SUFFIX)
    for length in reversed(lengths):
        num_tokens += len(FRAME.before_answer) + length + len(FRAME.after_answer) + 2
        if num_tokens > 4096:
            break
        whole.insert(0, length)
    assert earlier_answers(prompt, FRAME) == whole


def test_unknown_ids_and_empty_prompts_do_no_harm() -> None:
    assert np.isfinite(FEATURES.of([[], [10**6, -5], [20]])).all()
    np.testing.assert_array_equal(features(10**6, 20)[NUM_PLAIN:], features(20)[NUM_PLAIN:])


def test_a_batch_is_what_its_prompts_are_alone() -> None:
    prompts = [[20, 21], [WRITE, FIVE, WORDS], list(range(12, 90))]
    np.testing.assert_array_equal(FEATURES.of(prompts), np.stack([features(*prompt) for prompt in prompts]))


def test_vectors_lose_little_in_8_bits() -> None:
    vectors = np.random.default_rng(1).normal(size=(50, 7)).astype(np.float32)
    table = make_token_table(vectors, token_bytes)
    assert np.abs(table.vectors * table.scales - vectors).max() <= table.scales.max()


def test_tables_of_other_tokens_or_vectors_have_other_digests() -> None:
    digests = {TABLE.digest, word_table(seed=4).digest, word_table(num_dims=8).digest}
    assert len(digests) == 3
    assert word_table().digest == TABLE.digest
    assert digest_of_tokens([b"a", b"bc"]) != digest_of_tokens([b"ab", b"c"])


def test_a_table_of_wrong_shape_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=rf"sign_of is uint8 \[3\], expected uint8 \[{NUM_WORDS}\]"):
        TokenTable("", TABLE.vectors, TABLE.scales, TABLE.sign_of[:3], TABLE.number_of, TABLE.digits_of)

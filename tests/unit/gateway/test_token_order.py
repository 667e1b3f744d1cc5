"""Tokens come out by index, each once, whatever two streams repeat, delay or contradict."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.core.life import Attempt, FinishReason
from weir_gateway.requests.token_order import TokenConflict, TokenOrder

ATTEMPT = Attempt(1)
OLDER, NEWER = Attempt(1, 0), Attempt(1, 1)


@st.composite
def update_cases(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, list[int], bool]]]:
    """An output, and updates that together cover it, overlapping, in any order, some of them twice."""
    output = draw(st.lists(st.integers(0, 49_151), min_size=1, max_size=40))
    cuts = sorted({0, len(output), *draw(st.lists(st.integers(0, len(output)), max_size=6))})
    updates = []
    for start, end in itertools.pairwise(cuts):
        early = draw(st.integers(0, start))
        updates.append((early, output[early:end], end == len(output)))
    updates += draw(st.lists(st.sampled_from(updates), max_size=5))
    return output, draw(st.permutations(updates))


@given(update_cases())
def test_every_order_and_repetition_of_updates_gives_the_same_output_once(
    case: tuple[list[int], list[tuple[int, list[int], bool]]],
) -> None:
    output, updates = case
    order = TokenOrder(ATTEMPT, max_tokens=len(output))
    received: list[int] = []
    for first_index, token_ids, is_last in updates:
        assert order.finish_reason is None or received == output
        received += order.push(ATTEMPT, first_index, token_ids, FinishReason.LENGTH if is_last else None)
        assert received == output[: len(received)]
    assert received == output
    assert order.finish_reason is FinishReason.LENGTH
    assert not order.has_gap


def test_tokens_after_a_gap_wait_for_it() -> None:
    order = TokenOrder(ATTEMPT, max_tokens=4)
    assert order.push(ATTEMPT, 1, [11, 12], FinishReason.STOP) == []
    assert order.has_gap
    assert order.finish_reason is None
    assert order.push(ATTEMPT, 0, [10]) == [10, 11, 12]
    assert order.finish_reason is FinishReason.STOP


def test_an_end_without_tokens_waits_for_the_tokens_before_it() -> None:
    order = TokenOrder(ATTEMPT, max_tokens=4)
    order.push(ATTEMPT, 2, [], FinishReason.STOP)
    assert order.has_gap
    assert order.finish_reason is None
    order.push(ATTEMPT, 0, [10, 11])
    assert order.finish_reason is FinishReason.STOP


def test_an_older_attempt_is_refused_once_a_newer_one_spoke() -> None:
    order = TokenOrder(OLDER, max_tokens=8)
    assert order.push(OLDER, 0, [10]) == [10]
    assert order.push(NEWER, 1, [11]) == [11]
    assert order.push(OLDER, 2, [99]) == []
    assert order.push(NEWER, 2, [12]) == [12]


@pytest.mark.parametrize("index", [0, 2], ids=["a token that was sent", "a token that waits"])
def test_another_token_at_a_known_index_is_a_conflict(index: int) -> None:
    order = TokenOrder(ATTEMPT, max_tokens=8)
    order.push(ATTEMPT, 0, [10])
    order.push(ATTEMPT, 2, [12])
    with pytest.raises(TokenConflict, match=f"token {index} was 1{index}, and is 77 now"):
        order.push(ATTEMPT, index, [77])


def test_a_token_past_max_tokens_is_a_conflict() -> None:
    order = TokenOrder(ATTEMPT, max_tokens=2)
    with pytest.raises(TokenConflict, match="token 2 of at most 2"):
        order.push(ATTEMPT, 0, [10, 11, 12])


def test_a_token_past_the_end_is_a_conflict_in_either_order() -> None:
    order = TokenOrder(ATTEMPT, max_tokens=8)
    order.push(ATTEMPT, 0, [10, 11], FinishReason.STOP)
    with pytest.raises(TokenConflict, match="token 2 after the end at 2"):
        order.push(ATTEMPT, 2, [12])
    order = TokenOrder(ATTEMPT, max_tokens=8)
    order.push(ATTEMPT, 0, [10, 11, 12])
    with pytest.raises(TokenConflict, match="token 2 after the end at 2"):
        order.push(ATTEMPT, 1, [11], FinishReason.STOP)


def test_a_second_end_elsewhere_is_a_conflict() -> None:
    order = TokenOrder(ATTEMPT, max_tokens=8)
    order.push(ATTEMPT, 3, [13], FinishReason.STOP)
    with pytest.raises(TokenConflict, match="ended after 4 tokens, and now after 3"):
        order.push(ATTEMPT, 2, [12], FinishReason.STOP)


def test_what_waits_behind_a_gap_is_bounded() -> None:
    order = TokenOrder(ATTEMPT, max_tokens=100, max_ahead=5)
    assert order.push(ATTEMPT, 1, list(range(5))) == []
    with pytest.raises(TokenConflict, match="6 tokens wait for token 0, at most 5"):
        order.push(ATTEMPT, 6, [5])

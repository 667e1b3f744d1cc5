"""Tokens become text: whole characters, cut at stop strings, and one piece for a client that is behind."""

import itertools

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.gateway.fake_model import EOS, ByteDetokenizer

from weir.core.attempt import Attempt
from weir.core.life import FinishReason
from weir.core.logprobs import TokenLogprobs
from weir_gateway.requests.output import Output, OutputOptions, TokenUpdate
from weir_gateway.requests.stops import StopMatcher
from weir_gateway.requests.tokens import TokenOrder

ATTEMPT = Attempt(1)


def make_output(stops: list[str], output_options: OutputOptions = OutputOptions()) -> Output:  # noqa: B008 - frozen
    return Output(TokenOrder(ATTEMPT, 1000), ByteDetokenizer(), StopMatcher(stops), output_options)


def naive_text(token_ids: list[int], stops: list[str]) -> tuple[str, bool]:
    text = bytes(token_id for token_id in token_ids if token_id != EOS).decode(errors="replace")
    ends = [end for end in range(1, len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    if not ends:
        return text, False
    longest = max((stop for stop in stops if text[: ends[0]].endswith(stop)), key=len)
    return text[: ends[0] - len(longest)], True


# Bytes of "aé€" and the end token: characters get torn apart, and broken.
tokens = st.lists(st.sampled_from([*"aé€".encode(), EOS]), min_size=1, max_size=30)
stop_lists = st.lists(st.text("aé€\ufffd", min_size=1, max_size=3), max_size=3)


@given(tokens, stop_lists, st.lists(st.booleans(), min_size=30, max_size=30))
def test_the_pieces_are_the_text_up_to_the_first_stop_string(
    token_ids: list[int], stops: list[str], taken: list[bool]
) -> None:
    output = make_output(stops)
    text, sent, next_index = "", [], 0
    for index, token_id in enumerate(token_ids):
        is_last = index == len(token_ids) - 1
        output.push(TokenUpdate(ATTEMPT, index, [token_id], FinishReason.LENGTH if is_last else None))
        if taken[index] or output.finish_reason is not None:
            piece = output.take()
            assert piece.first_index == next_index
            next_index += len(piece.token_ids)
            sent += piece.token_ids
            text += piece.text
        if output.finish_reason is not None:
            break
    expected, is_stopped = naive_text(token_ids, stops)
    assert text == expected
    assert output.finish_reason is (FinishReason.STOP if is_stopped else FinishReason.LENGTH)
    assert sent == token_ids[: output.num_tokens]
    assert is_stopped or sent == token_ids


@given(tokens, st.lists(st.integers(0, 30), max_size=5))
def test_how_tokens_are_grouped_does_not_change_the_text(token_ids: list[int], cuts: list[int]) -> None:
    whole, parts = make_output(["é"]), make_output(["é"])
    whole.push(TokenUpdate(ATTEMPT, 0, token_ids, FinishReason.LENGTH))
    bounds = sorted({0, len(token_ids), *(cut for cut in cuts if cut < len(token_ids))})
    for start, end in itertools.pairwise(bounds):
        parts.push(
            TokenUpdate(ATTEMPT, start, token_ids[start:end], FinishReason.LENGTH if end == len(token_ids) else None)
        )
    assert parts.take() == whole.take()
    assert parts.finish_reason is whole.finish_reason


def test_what_a_slow_client_has_not_taken_is_one_piece() -> None:
    output = make_output([])
    for index, token_id in enumerate(b"hello"):
        output.push(TokenUpdate(ATTEMPT, index, [token_id]))
    piece = output.take()
    assert (piece.first_index, bytes(piece.token_ids), piece.text) == (0, b"hello", "hello")
    assert not output.has_pending
    output.push(TokenUpdate(ATTEMPT, 5, [33]))
    assert output.take().first_index == 5


def test_nothing_comes_after_the_end() -> None:
    output = make_output(["b"])
    assert output.push(TokenUpdate(ATTEMPT, 0, list(b"abc")))
    assert output.finish_reason is FinishReason.STOP
    assert not output.push(TokenUpdate(ATTEMPT, 3, [100]))
    assert (output.take().text, output.num_tokens) == ("a", 2)


@given(tokens, stop_lists, st.integers(0, 10))
def test_a_stop_string_counts_when_it_is_completed_after_min_tokens(
    token_ids: list[int], stops: list[str], min_tokens: int
) -> None:
    output = make_output(stops, OutputOptions(min_tokens=min_tokens))
    output.push(TokenUpdate(ATTEMPT, 0, token_ids, FinishReason.LENGTH))
    detokenizer, text = ByteDetokenizer(), ""
    for index, token_id in enumerate(token_ids):
        before = len(text)
        text += detokenizer.push([token_id])
        ends = range(before + 1, len(text) + 1) if index >= min_tokens else ()
        if any(text[:end].endswith(stop) for end in ends for stop in stops):
            assert output.finish_reason is FinishReason.STOP
            assert output.num_tokens == index + 1
            return
    assert output.num_tokens == len(token_ids)


def logprobs_of(token_ids: list[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(token_id, -token_id / 8, 1, ((token_id, -token_id / 8),)) for token_id in token_ids]


def test_each_token_has_its_log_probability_whatever_came_twice_or_too_early() -> None:
    output = make_output([], OutputOptions(has_logprobs=True))
    told = logprobs_of([10, 11, 12, 13])
    output.push(TokenUpdate(ATTEMPT, 2, [12, 13], logprobs=told[2:]))
    output.push(TokenUpdate(ATTEMPT, 0, [10], logprobs=told[:1]))
    assert output.take().logprobs == told[:1]
    output.push(TokenUpdate(ATTEMPT, 0, [10, 11], logprobs=told[:2]))
    assert output.take().logprobs == told[1:]


def test_a_log_probability_that_died_with_its_worker_is_unknown() -> None:
    output = make_output([], OutputOptions(has_logprobs=True))
    output.push(TokenUpdate(ATTEMPT, 0, [10, 11]))
    assert [(entry.token_id, entry.logprob, entry.rank) for entry in output.take().logprobs] == [
        (10, -9999.0, 0),
        (11, -9999.0, 0),
    ]


def test_who_did_not_ask_for_log_probabilities_gets_none() -> None:
    output = make_output([])
    output.push(TokenUpdate(ATTEMPT, 0, [10], logprobs=logprobs_of([10])))
    assert output.take().logprobs == []


def test_those_of_the_prompt_come_with_the_first_token_however_often_they_are_sent() -> None:
    output = make_output([], OutputOptions(has_logprobs=True))
    told = logprobs_of([1, 2, 3, 4])
    for first, part in ((1, told[:2]), (1, told[:3]), (4, told[3:])):
        output.push(TokenUpdate(ATTEMPT, 0, [], prompt_logprobs=part, first_prompt_index=first))
    assert not output.has_pending
    output.push(TokenUpdate(ATTEMPT, 0, [10], logprobs=logprobs_of([10])))
    assert output.take().prompt_logprobs == tuple(told)
    output.push(TokenUpdate(ATTEMPT, 1, [11], prompt_logprobs=told, first_prompt_index=1))
    assert output.take().prompt_logprobs == ()

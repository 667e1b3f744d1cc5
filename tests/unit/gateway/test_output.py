"""Tokens become text: whole characters, cut at stop strings, and one delta for a client that is behind."""

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.gateway.fake_model import EOS, ByteDetokenizer
from tests.unit.gateway.fake_workers import GOING_ON, LENGTH, token_logprobs, update

from weir.core.life import Attempt, FinishReason
from weir.rpc.conversions import all_logprobs_from_pb, attempt_from_pb
from weir.wire.v1 import worker_pb2
from weir_gateway.requests.output import Output, OutputDelta, joined
from weir_gateway.requests.stop_strings import StopMatcher
from weir_gateway.requests.text_parts import TextParts
from weir_gateway.requests.token_order import TokenOrder

REQUEST_ID = "r"


def make_output(stops: list[str], *, has_logprobs: bool = False, min_tokens: int = 0) -> Output:
    order = TokenOrder(Attempt(1), 1000)
    return Output(
        order, TextParts(ByteDetokenizer(), StopMatcher(stops)), has_logprobs=has_logprobs, min_tokens=min_tokens
    )


def push(output: Output, message: worker_pb2.SequenceUpdate) -> bool:
    return output.push(attempt_from_pb(message.attempt), message)


def take(output: Output) -> OutputDelta:
    delta = output.try_take()
    assert delta is not None
    return delta


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
def test_the_deltas_are_the_text_up_to_the_first_stop_string(
    token_ids: list[int], stops: list[str], taken: list[bool]
) -> None:
    output = make_output(stops)
    text, sent, next_index = "", [], 0
    for index, token_id in enumerate(token_ids):
        is_last = index == len(token_ids) - 1
        push(output, update(REQUEST_ID, index, [token_id], finish=LENGTH if is_last else GOING_ON))
        if taken[index] or output.finish_reason is not None:
            delta = take(output)
            assert delta.first_index == next_index
            next_index += len(delta.token_ids)
            sent += delta.token_ids
            text += delta.text
        if output.finish_reason is not None:
            break
    expected, is_stopped = naive_text(token_ids, stops)
    assert text == expected
    assert output.finish_reason is (FinishReason.STOP if is_stopped else FinishReason.LENGTH)
    assert output.matched_stop in (stops if is_stopped else [None])
    assert sent == token_ids[: output.num_tokens]
    assert is_stopped or sent == token_ids


@given(tokens, st.lists(st.integers(0, 30), max_size=5))
def test_how_tokens_are_grouped_does_not_change_the_text(token_ids: list[int], cuts: list[int]) -> None:
    whole, parts = make_output(["é"]), make_output(["é"])
    push(whole, update(REQUEST_ID, 0, token_ids, finish=LENGTH))
    bounds = sorted({0, len(token_ids), *(cut for cut in cuts if cut < len(token_ids))})
    for start, end in itertools.pairwise(bounds):
        finish = LENGTH if end == len(token_ids) else GOING_ON
        push(parts, update(REQUEST_ID, start, token_ids[start:end], finish=finish))
    assert take(parts) == take(whole)
    assert parts.finish_reason is whole.finish_reason


def test_what_a_slow_client_has_not_taken_is_one_delta() -> None:
    output = make_output([])
    for index, token_id in enumerate(b"hello"):
        push(output, update(REQUEST_ID, index, [token_id]))
    delta = take(output)
    assert (delta.first_index, bytes(delta.token_ids), delta.text) == (0, b"hello", "hello")
    assert output.try_take() is None
    push(output, update(REQUEST_ID, 5, [33]))
    assert take(output).first_index == 5


def test_nothing_comes_after_the_end() -> None:
    output = make_output(["b"])
    assert push(output, update(REQUEST_ID, 0, list(b"abc")))
    assert output.finish_reason is FinishReason.STOP
    assert not push(output, update(REQUEST_ID, 3, [100]))
    assert (take(output).text, output.num_tokens) == ("a", 2)


@given(tokens, stop_lists, st.integers(0, 10))
def test_a_stop_string_counts_when_it_is_completed_after_min_tokens(
    token_ids: list[int], stops: list[str], min_tokens: int
) -> None:
    output = make_output(stops, min_tokens=min_tokens)
    push(output, update(REQUEST_ID, 0, token_ids, finish=LENGTH))
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


def test_each_token_has_its_log_probability_whatever_came_twice_or_too_early() -> None:
    output = make_output([], has_logprobs=True)
    sent = [token_logprobs(token_id, 1) for token_id in (10, 11, 12, 13)]
    expected = list(all_logprobs_from_pb(sent))
    push(output, update(REQUEST_ID, 2, [12, 13], logprobs=sent[2:]))
    push(output, update(REQUEST_ID, 0, [10], logprobs=sent[:1]))
    assert take(output).logprobs == expected[:1]
    push(output, update(REQUEST_ID, 0, [10, 11], logprobs=sent[:2]))
    assert take(output).logprobs == expected[1:]


def test_a_log_probability_that_died_with_its_worker_is_unknown() -> None:
    output = make_output([], has_logprobs=True)
    push(output, update(REQUEST_ID, 0, [10, 11]))
    assert [(entry.token_id, entry.logprob, entry.rank) for entry in take(output).logprobs] == [
        (10, -9999.0, 0),
        (11, -9999.0, 0),
    ]


def test_who_did_not_ask_for_log_probabilities_gets_none() -> None:
    output = make_output([])
    push(output, update(REQUEST_ID, 0, [10], logprobs=[token_logprobs(10, 1)]))
    assert take(output).logprobs == []


def test_those_of_the_prompt_come_with_the_first_token_however_often_they_are_sent() -> None:
    output = make_output([], has_logprobs=True)
    sent = [token_logprobs(token_id, 1) for token_id in (1, 2, 3, 4)]
    for first, part in ((1, sent[:2]), (1, sent[:3]), (4, sent[3:])):
        push(output, update(REQUEST_ID, 0, prompt_logprobs=part, first_prompt_index=first))
    assert output.try_take() is None
    push(output, update(REQUEST_ID, 0, [10], logprobs=[token_logprobs(10, 1)]))
    assert take(output).prompt_logprobs == all_logprobs_from_pb(sent)
    push(output, update(REQUEST_ID, 1, [11], prompt_logprobs=sent))
    assert take(output).prompt_logprobs == ()


@given(tokens, st.lists(st.booleans(), min_size=30, max_size=30))
def test_deltas_joined_are_the_delta_of_a_client_that_took_all_at_once(token_ids: list[int], taken: list[bool]) -> None:
    whole, parts = make_output([], has_logprobs=True), make_output([], has_logprobs=True)
    deltas = []
    for index, token_id in enumerate(token_ids):
        finish = LENGTH if index == len(token_ids) - 1 else GOING_ON
        new = update(REQUEST_ID, index, [token_id], finish=finish, logprobs=[token_logprobs(token_id, 1)])
        new.prompt_logprobs.append(token_logprobs(7, 1))
        for output in (whole, parts):
            push(output, new)
        if taken[index] or finish == LENGTH:
            deltas.append(take(parts))
    assert joined(deltas) == take(whole)


class CountedDetokenizer(ByteDetokenizer):
    def __init__(self) -> None:
        super().__init__()
        self.pushed: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        self.pushed.append(len(token_ids))
        return super().push(token_ids)


def test_tokens_that_gather_become_text_at_once_and_one_by_one_where_a_stop_string_may_end_them() -> None:
    for stops, pushed in (([], [3, 2]), (["z"], [1, 1, 1, 1, 1])):
        detokenizer = CountedDetokenizer()
        output = Output(TokenOrder(Attempt(1), 1000), TextParts(detokenizer, StopMatcher(stops)))
        for index, token_id in enumerate(b"abc"):
            push(output, update(REQUEST_ID, index, [token_id]))
        assert take(output).text == "abc"
        push(output, update(REQUEST_ID, 3, [*b"d"]))
        push(output, update(REQUEST_ID, 4, [*b"e"], finish=LENGTH))
        last = take(output)
        assert (last.first_index, last.text, last.finish_reason) == (3, "de", FinishReason.LENGTH)
        assert detokenizer.pushed == pushed

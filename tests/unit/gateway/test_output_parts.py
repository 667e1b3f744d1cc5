"""What an answer is made of, and how much of it is reasoning, follows from its tokens alone: however they come, and
wherever a client comes back."""

import random
from collections.abc import Callable, Iterable, Sequence

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.gateway.fake_workers import STOP, update
from tests.unit.gateway.thinking_model import CALL, CLOSES, EOS, OPENS, ThinkingDetokenizer, tokens_of

from weir.core.life import Attempt
from weir.rpc.conversions import attempt_from_pb
from weir_gateway.answers.events import AnswerEvent, join_events
from weir_gateway.answers.formats import HERMES, THINK, AnswerFormat
from weir_gateway.answers.parser import AnswerParser
from weir_gateway.requests.output import Output
from weir_gateway.requests.stop_strings import StopMatcher
from weir_gateway.requests.text_parts import TextParts
from weir_gateway.requests.token_order import TokenOrder

PIECES = ("a", "é", " ", "\n", "<", "</think", "now", '{"name": "now", "arguments": {}}', "</tool_call>", "stop")
answers = st.lists(
    st.sampled_from([*map(tokens_of, PIECES), [OPENS], [CLOSES], [CALL]]).map(tuple), min_size=1, max_size=14
).map(lambda pieces: [token_id for piece in pieces for token_id in piece])


def make_output(*, stops: Sequence[str], starts_in_reasoning: bool) -> Output:
    def make() -> TextParts:
        parser = AnswerParser(
            AnswerFormat(THINK, HERMES), tool_names=frozenset({"now"}), starts_in_reasoning=starts_in_reasoning
        )
        return TextParts(ThinkingDetokenizer(frozenset({OPENS, CLOSES, CALL})), StopMatcher(stops), parser)

    return Output(TokenOrder(Attempt(1), 1000), make(), make_anew=make)


def run(output: Output, token_ids: list[int], sizes: Iterable[int], is_taken: Callable[[], bool]) -> list[AnswerEvent]:
    """Pushes so many tokens at a time; all that a client gets."""
    events: list[AnswerEvent] = []
    index = 0
    for size in sizes:
        new = token_ids[index : index + size]
        if not new or output.finish_reason is not None:
            break
        message = update("r", index, new)
        index += len(new)
        if index >= len(token_ids):
            message.finish_reason = STOP
        output.push(attempt_from_pb(message.attempt), message)
        delta = output.try_take() if is_taken() or output.finish_reason is not None else None
        events += (delta.events or ()) if delta is not None else ()
    return join_events(events)


@given(answers, st.booleans(), st.booleans(), st.integers(0, 2**32))
def test_parts_and_their_counts_do_not_depend_on_how_tokens_come(
    token_ids: list[int], starts_in_reasoning: bool, has_stops: bool, seed: int
) -> None:
    generator = random.Random(seed)
    ways: tuple[tuple[list[int], Callable[[], bool]], ...] = (
        ([1] * 500, lambda: True),
        ([500], lambda: True),
        ([generator.randint(1, 7) for _ in range(500)], lambda: generator.random() < 0.5),
    )
    results = []
    for sizes, is_taken in ways:
        output = make_output(stops=["stop"] if has_stops else [], starts_in_reasoning=starts_in_reasoning)
        events = run(output, [*token_ids, EOS], sizes, is_taken)
        results.append((events, output.num_reasoning_tokens, output.num_calls, output.num_tokens))
    assert results[1:] == results[:-1]


@given(answers, st.booleans(), st.integers(0, 60))
def test_a_client_that_comes_back_gets_the_rest(token_ids: list[int], starts_in_reasoning: bool, at: int) -> None:
    token_ids = [*token_ids, EOS]
    at = min(at, len(token_ids) - 1)
    plain = make_output(stops=(), starts_in_reasoning=starts_in_reasoning)
    first = run(plain, token_ids, [at, 500] if at else [500], lambda: True)
    again = make_output(stops=(), starts_in_reasoning=starts_in_reasoning)
    had = run(again, token_ids, [at] if at else [], lambda: True)
    rest = update("r", at, token_ids[at:], finish=STOP)
    again.push(attempt_from_pb(rest.attempt), rest)
    again.rewind(at)
    delta = again.try_take()
    assert delta is not None
    assert join_events([*had, *(delta.events or ())]) == first
    assert again.num_reasoning_tokens == plain.num_reasoning_tokens


def test_reasoning_is_counted_with_its_markers() -> None:
    for text, starts_within, expected in (
        ("<think>ab</think>cd", False, 4),
        ("ab</think>cd", True, 3),
        ("<think>ab", False, 3),
        ("ab<think>cd", False, 0),
    ):
        output = make_output(stops=(), starts_in_reasoning=starts_within)
        run(output, tokens_of(text), [500], lambda: True)
        assert output.num_reasoning_tokens == expected, text

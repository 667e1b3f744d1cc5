"""Who continues whom in a trace of block hashes, and what earlier answers say."""

import itertools

import numpy as np
import pytest

from benchmarks.predictors.turns import TracedTurn, linked, measure_turns
from weir.sim.workloads.traces import MOONCAKE_BLOCK_TOKENS
from weir.sim.workloads.workload import SimRequest
from weir.training.ranking import RankingSettings

QUICK = RankingSettings(num_members=2, least_steps=200, num_epochs=6)


def request(prompt: int, output: int, *hashes: int) -> SimRequest:
    """Hashes of its blocks behind block 0; a partly filled one gets its own."""
    num_blocks = -(-prompt // MOONCAKE_BLOCK_TOKENS)
    own = tuple(-prompt * 1000 - place for place in range(num_blocks))
    return SimRequest("r", 0.0, prompt, output, output, prefix_blocks=(0, *hashes, *own)[:num_blocks])


def test_a_request_that_begins_with_anothers_new_blocks_continues_it() -> None:
    turns = linked([request(1100, 80, 7), request(1300, 50, 7), request(1500, 9, 7)])
    assert [turn.earlier for turn in turns] == [(), (80,), (80, 50)]
    assert [turn.conversation for turn in turns] == [0, 0, 0]
    assert turns[1].num_new_tokens == 1300 - 1100 - 80


def test_a_prompt_without_room_for_the_answer_is_no_continuation() -> None:
    assert linked([request(1100, 80, 7), request(1150, 50, 7)])[1].earlier == ()


def test_a_shared_beginning_that_was_there_before_links_nobody() -> None:
    """A long system prompt: its blocks are new with the first request alone."""
    first, second, third = request(1100, 80, 7), request(1110, 70, 7), request(1600, 60, 7)
    turns = linked([first, second, third])
    assert [turn.earlier for turn in turns[:2]] == [(), ()]
    assert turns[2].earlier == (80,), "the second ended with a block that it did not bring"


def test_prompts_of_less_than_two_blocks_link_nobody() -> None:
    assert linked([request(900, 10), request(1400, 10)])[1].earlier == ()


def test_earlier_answers_are_found_to_tell_where_they_do() -> None:
    source = np.random.default_rng(1)
    turns: list[TracedTurn] = []
    for conversation in range(120):
        length = int(np.exp(source.normal(5, 1)))
        answers = [max(1, int(length * np.exp(0.3 * source.normal()))) for _ in range(3)]
        for number, answer in enumerate(answers):
            turns.append(TracedTurn(conversation, int(source.integers(5, 500)), answer, tuple(answers[:number])))
    result = measure_turns(turns, settings=QUICK)
    assert (result.num_requests, result.num_later) == (360, 240)
    assert result.last_answer.value > 0.6
    assert abs(result.without.value) < 0.2
    assert result.gain.value - result.gain.half_width > 0.3


def test_a_trace_without_conversations_is_refused() -> None:
    with pytest.raises(ValueError, match="no request continues another"):
        measure_turns([TracedTurn(number, 5, 5, ()) for number in itertools.islice(itertools.count(), 10)])

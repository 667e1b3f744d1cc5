"""A sequence's chunks: after its pages were lost, and with what it has of another worker."""

from dataclasses import replace

from tests.unit.engine.world import Records, params

from weir.core.sampling import SamplingParams
from weir.engine.messages import Arrival
from weir.engine.plan import ScoreSpec
from weir.engine.sequence import GrowingHistory, Sequence


def test_what_was_lost_is_computed_again_by_itself_and_not_scored_twice() -> None:
    made = params(tuple(range(40)))
    made = replace(made, sampling=replace(made.sampling, prompt_logprobs=0))
    sequence = Sequence.of_arrival(Arrival(made))
    sequence.allocate(0, Records(10, 1).open(0), (4, 5, 6))
    first = sequence.plan_chunk(20)
    assert first.score == ScoreSpec(tuple(range(1, 21)), 0)
    sequence.record_chunk(first.end, None)
    sequence.drop_pages(now_s=0.0)
    assert (sequence.block_table, sequence.num_computed, sequence.is_preempted) == ((), 0, True)
    sequence.restore((7, 8, 9), is_intact=False)
    again = sequence.plan_chunk(64)
    assert (again.start, again.end, again.score, again.block_table) == (0, 20, None, (7, 8))
    sequence.record_chunk(again.end, None)
    last = sequence.plan_chunk(64)
    assert (last.start, last.end) == (20, 40)
    assert last.score == ScoreSpec(tuple(range(21, 40)), 0)
    assert last.sample is not None


def test_an_adopted_sequence_goes_on_with_the_penalties_of_all_its_output() -> None:
    penalised = params((1, 2), sampling=SamplingParams(0.0, frequency_penalty=1.0))
    arrival = Arrival(penalised, slot=0, output_token_ids=(4, 4, 5), block_table=(1,), num_computed_tokens=4)
    chunk = Sequence.of_arrival(arrival).plan_chunk(8)
    assert chunk.sample is not None
    assert chunk.sample.output_index == 3
    assert chunk.sample.history is not None
    assert chunk.sample.history.token_ids.tolist() == [1, 2, 4, 4, 5]
    assert chunk.sample.history.num_prompt_tokens == 2


def test_a_history_that_was_handed_out_does_not_change_when_the_sequence_grows() -> None:
    history = GrowingHistory([1, 2, 3], 2)
    views = []
    for token_id in range(600):
        views.append(history.view())
        history.append(token_id)
    for length, view in enumerate(views):
        assert view.token_ids.tolist() == [1, 2, 3, *range(length)]

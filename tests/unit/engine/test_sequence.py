"""A sequence's chunks after its pages were lost."""

from dataclasses import replace

from tests.unit.engine.world import Records, params

from weir.engine.messages import Arrival
from weir.engine.plan import ScoreSpec
from weir.engine.sequence import Sequence


def test_what_was_lost_is_computed_again_by_itself_and_nothing_is_told_of_it_twice() -> None:
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

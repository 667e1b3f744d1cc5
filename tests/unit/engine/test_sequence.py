"""A sequence's chunks: after its pages were lost, and with what it has of another worker."""

from dataclasses import replace

import pytest
from tests.unit.engine.world import Records, params

from weir.core.sampling import SamplingParams
from weir.engine.history import GrowingHistory
from weir.engine.messages import Arrival
from weir.engine.plan import ScoreSpec
from weir.engine.sequence import Sequence
from weir.kv.geometry import first_page_read
from weir.kv.records.record import SequenceSnapshot


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


def behind_its_window(num_shared_pages: int = 0) -> tuple[Sequence, Records]:
    """A prompt of 200 tokens in pages 20 to 32, 180 of them computed; it sees 40, so that it has given 8 pages back."""
    records = Records(64, 1, 256)
    arrival = Arrival(
        replace(params(tuple(range(200)), num_reserved_pages=16), prefix_seed=b"seed"),
        block_table=tuple(range(20, 20 + num_shared_pages)),
        num_computed_tokens=16 * num_shared_pages,
        num_shared_pages=num_shared_pages,
    )
    sequence = Sequence.of_arrival(arrival)
    sequence.allocate(0, records.open(0), tuple(range(20 + num_shared_pages, 33)))
    sequence.record_chunk(180, None)
    assert sequence.give_back(first_page_read(180, window=40)) == tuple(range(20, 28))
    return sequence, records


def read(records: Records) -> SequenceSnapshot:
    snapshot = records.open(0).read()
    assert snapshot is not None
    return snapshot


def test_a_sequence_that_has_passed_its_window_holds_the_rest_and_so_does_its_record() -> None:
    sequence, records = behind_its_window()
    assert sequence.held_pages == read(records).held_pages == (28, 29, 30, 31, 32)
    assert (sequence.first_page, sequence.num_computed) == (8, 180)
    assert sequence.num_pages_short_of(0) == 0
    assert sequence.num_pages_short_of(16) == 1
    assert sequence.check_integrity() == []


@pytest.mark.parametrize("num_shared_pages", [0, 5, 10], ids=lambda number: f"{number} shared")
def test_one_that_is_swapped_out_behind_its_window_comes_back_to_as_many_pages(num_shared_pages: int) -> None:
    """Also those that it shared leave: without the pages before them, which are gone, they are of no use."""
    sequence, records = behind_its_window(num_shared_pages)
    assert sequence.private_pages == (28, 29, 30, 31, 32)
    assert sequence.num_sharable_private_pages == 4, "12 full pages of the prompt, 8 of them gone"
    sequence.swap_out((0, 1, 2, 3), now_s=1.0)
    assert sequence.check_integrity() == []
    assert (sequence.held_pages, sequence.num_computed, sequence.num_pages_short_of(0)) == ((), 0, 5)
    assert (read(records).block_table, read(records).num_computed_tokens) == ((), 0), "an adopter begins anew"
    sequence.restore((40, 41, 42, 43, 44), is_intact=True, now_s=2.0)
    assert sequence.check_integrity() == []
    assert sequence.held_pages == read(records).held_pages == (40, 41, 42, 43, 44)
    assert (sequence.first_page, sequence.num_computed) == (8, 180)
    assert read(records).num_computed_tokens == 180
    assert sequence.plan_chunk(64).block_table[8:] == (40, 41, 42, 43, 44)


@pytest.mark.parametrize("num_shared_pages", [0, 5, 10], ids=lambda number: f"{number} shared")
@pytest.mark.parametrize("way", ["dropped", "spoiled"])
def test_one_that_has_lost_what_is_behind_its_window_is_computed_again_from_the_first_token(
    way: str, num_shared_pages: int
) -> None:
    sequence, records = behind_its_window(num_shared_pages)
    if way == "dropped":
        sequence.drop_pages(now_s=1.0)
        assert sequence.num_pages_short_of(0) == 13, "all at once: it does not wait a second time"
        sequence.restore(tuple(range(40, 53)), is_intact=False, now_s=2.0)
        assert sequence.num_missing_pages(200) == 0
    else:
        sequence.swap_out((0, 1, 2, 3), now_s=1.0)
        sequence.restore(tuple(range(40, 45)), is_intact=False, now_s=2.0)
        assert sequence.num_missing_pages(200) == 8
    assert sequence.check_integrity() == []
    assert (sequence.first_page, sequence.num_computed, sequence.num_computed_before) == (0, 0, 180)
    assert sequence.held_pages == read(records).held_pages
    chunk = sequence.plan_chunk(64)
    assert (chunk.start, chunk.block_table[:4]) == (0, (40, 41, 42, 43))

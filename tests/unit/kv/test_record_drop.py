"""Pages taken back from a record: whoever reads it, whenever its writer died, finds no page that is not its."""

from dataclasses import replace

import pytest

from weir.core.life import FinishReason
from weir.kv.geometry import ArenaGeometry
from weir.kv.layout import RECORD_HEADER_BYTES, layout_of
from weir.kv.records.record import SequenceParams, SequenceRecord, SequenceSnapshot

_GEOMETRY = ArenaGeometry(page_bytes=4096, num_pages=40, num_slots=1, max_context_tokens=256)


def running(params: SequenceParams) -> tuple[memoryview, SequenceRecord]:
    """A prompt of 40 tokens in pages 3, 4, 9 with two output tokens, all but the last computed."""
    memory = memoryview(bytearray(layout_of(_GEOMETRY).record_bytes))
    record = SequenceRecord(memory, _GEOMETRY)
    record.begin(params)
    record.set_block_table([3, 4, 9])
    record.append_token(11)
    record.publish(len(params.prompt_token_ids))
    record.append_token(12)
    record.publish(len(params.prompt_token_ids) + 1)
    return memory, record


def read(memory: memoryview) -> SequenceSnapshot:
    """As another process would."""
    snapshot = SequenceRecord(memory, _GEOMETRY).read()
    assert snapshot is not None
    return snapshot


@pytest.fixture
def long_params(params: SequenceParams) -> SequenceParams:
    return replace(params, prompt_token_ids=tuple(range(40)))


def test_a_record_without_pages_keeps_its_tokens_and_says_that_nothing_is_computed(long_params: SequenceParams) -> None:
    memory, record = running(long_params)
    record.drop_pages(0)
    snapshot = read(memory)
    assert snapshot.block_table == ()
    assert snapshot.num_computed_tokens == 0
    assert snapshot.output_token_ids == (11, 12)
    assert snapshot.rng_position == 2
    summary = record.summarize()
    assert summary is not None
    assert summary.page_ids.tolist() == []


def test_kept_pages_count_as_far_as_they_reach(long_params: SequenceParams) -> None:
    memory, record = running(long_params)
    record.drop_pages(2)
    assert read(memory).block_table == (3, 4)
    assert read(memory).num_computed_tokens == 32
    record.drop_pages(2)
    assert read(memory).num_computed_tokens == 32


def test_new_pages_may_take_the_place_of_dropped_ones(long_params: SequenceParams) -> None:
    memory, record = running(long_params)
    record.drop_pages(1)
    with pytest.raises(ValueError, match="first 1 entries are published"):
        record.set_block_table([30, 31, 32])
    record.set_block_table([3, 31, 32])
    record.publish(41)
    record.append_token(13)
    record.publish(42)
    assert read(memory).block_table == (3, 31, 32)
    assert read(memory).output_token_ids == (11, 12, 13)


def test_a_publication_that_is_torn_after_a_drop_brings_no_dropped_page_back(long_params: SequenceParams) -> None:
    memory, record = running(long_params)
    record.drop_pages(0)
    record.set_block_table([30, 31, 32])
    assert read(memory).block_table == (), "not published yet"
    before = bytes(memory[: 2 * RECORD_HEADER_BYTES])
    record.publish(41)
    changed = [i for i in range(2 * RECORD_HEADER_BYTES) if memory[i] != before[i]]
    memory[changed[-1]] ^= 0xFF  # the newest header never became whole
    assert read(memory).block_table == ()
    assert read(memory).num_computed_tokens == 0


def test_more_pages_than_there_are_cannot_be_kept(long_params: SequenceParams) -> None:
    _, record = running(long_params)
    with pytest.raises(ValueError, match="num_kept 4: the block table has 3 pages, from 0 on"):
        record.drop_pages(4)


def test_first_pages_that_are_given_back_are_the_sequences_no_more_and_all_else_is_as_it_was(
    long_params: SequenceParams,
) -> None:
    memory, record = running(long_params)
    before = read(memory)
    record.drop_first_pages(2)
    after = read(memory)
    assert after == replace(before, first_page=2)
    assert after.held_pages == (9,)
    summary = SequenceRecord(memory, _GEOMETRY).summarize()
    assert summary is not None
    assert (summary.page_ids.tolist(), summary.first_page, summary.num_computed_tokens) == ([9], 2, 41)


def test_whoever_goes_on_with_it_adds_pages_and_gives_more_back(long_params: SequenceParams) -> None:
    memory, record = running(long_params)
    record.drop_first_pages(1)
    assert SequenceRecord(memory, _GEOMETRY).raise_adoption()
    adopter = SequenceRecord(memory, _GEOMETRY)
    snapshot = adopter.read()
    assert snapshot is not None
    assert (snapshot.held_pages, snapshot.params.attempt.adoption) == ((4, 9), long_params.attempt.adoption + 1)
    for token_id in range(13, 20):
        adopter.append_token(token_id)
    adopter.append_page(30)
    adopter.publish(48)
    assert read(memory).held_pages == (4, 9, 30)
    adopter.drop_first_pages(3)
    assert read(memory).held_pages == (30,)
    assert read(memory).num_computed_tokens == 48


def test_a_torn_publication_brings_no_page_back_that_was_given_back(long_params: SequenceParams) -> None:
    """Whatever part of the next header was written: this publication counts, or the one that was being made."""
    memory, record = running(long_params)
    record.drop_first_pages(2)
    before = bytes(memory[: 2 * RECORD_HEADER_BYTES])
    record.append_token(13)
    record.publish(42)
    after = bytes(memory[: 2 * RECORD_HEADER_BYTES])
    changed = [index for index in range(2 * RECORD_HEADER_BYTES) if after[index] != before[index]]
    for num_written in range(len(changed)):
        memory[: 2 * RECORD_HEADER_BYTES] = before
        for index in changed[:num_written]:
            memory[index] = after[index]
        assert read(memory).held_pages == (9,), f"{num_written} of {len(changed)} bytes"
        assert read(memory).num_computed_tokens == 41


def test_a_publication_that_gives_pages_back_and_is_torn_has_not_given_any_back(long_params: SequenceParams) -> None:
    memory, record = running(long_params)
    before = bytes(memory[: 2 * RECORD_HEADER_BYTES])
    record.drop_first_pages(2)
    changed = [index for index in range(2 * RECORD_HEADER_BYTES) if memory[index] != before[index]]
    memory[changed[-1]] ^= 0xFF
    assert read(memory).held_pages == (3, 4, 9)


@pytest.mark.parametrize("first_page", [0, 3, 4, -1])
def test_pages_that_are_not_computed_or_gone_already_cannot_be_given_back(
    first_page: int, long_params: SequenceParams
) -> None:
    """41 tokens are computed: the third page is being written."""
    memory, record = running(long_params)
    record.drop_first_pages(1)
    with pytest.raises(ValueError, match=f"first_page {first_page}: it is 1, and 41 tokens are computed"):
        record.drop_first_pages(first_page)
    assert read(memory).held_pages == (4, 9)


def test_a_sequence_without_its_first_pages_keeps_none_and_may_come_back_as_it_was(long_params: SequenceParams) -> None:
    memory, record = running(long_params)
    record.drop_first_pages(2)
    with pytest.raises(ValueError, match="num_kept 3: the block table has 3 pages, from 2 on"):
        record.drop_pages(3)
    record.drop_pages(0)
    assert (read(memory).block_table, read(memory).first_page, read(memory).num_computed_tokens) == ((), 0, 0)
    with pytest.raises(ValueError, match="first_page 4"):
        record.set_block_table([3, 4, 31], first_page=4)
    record.set_block_table([3, 4, 31], first_page=2)
    record.publish(41)
    assert (read(memory).held_pages, read(memory).num_computed_tokens) == ((31,), 41)
    with pytest.raises(ValueError, match="first_page 1: it was 2"):
        record.set_block_table([3, 4, 31, 32], first_page=1)


def test_an_end_names_no_page_whatever_was_given_back_before(long_params: SequenceParams) -> None:
    memory, record = running(long_params)
    record.drop_first_pages(2)
    record.end(FinishReason.STOP)
    assert (read(memory).block_table, read(memory).first_page) == ((), 0)
    assert read(memory).finish_reason is FinishReason.STOP

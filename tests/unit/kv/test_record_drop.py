"""Pages taken back from a record: whoever reads it, whenever its writer died, finds no page that is not its."""

from dataclasses import replace

import pytest

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
    with pytest.raises(ValueError, match="num_kept 4: the block table has 3 pages"):
        record.drop_pages(4)

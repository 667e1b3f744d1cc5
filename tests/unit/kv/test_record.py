"""Sequence records: what is published is read, whatever happens to the writing of the next publication."""

from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weir.core.life import Attempt, FinishReason, SchedulingParams
from weir.core.sampling import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams, StopRules
from weir.kv.arena.segment import Segment
from weir.kv.geometry import ArenaGeometry
from weir.kv.layout import (
    LAYOUT_VERSION,
    RECORD_HEADER_BYTES,
    RECORD_LOGPROBS_BYTES,
    RECORD_PARAMS_BYTES,
    layout_of,
)
from weir.kv.records import format as record_format
from weir.kv.records.format import PACKED_HEADER_BYTES
from weir.kv.records.record import SequenceParams, SequenceRecord

_GEOMETRY = ArenaGeometry(page_bytes=4096, num_pages=40, num_slots=1, max_context_tokens=256)


def _memory() -> memoryview:
    return memoryview(bytearray(layout_of(_GEOMETRY).record_bytes))


def _published(memory: memoryview, params: SequenceParams) -> SequenceRecord:
    """A record that was published twice: with one output token, then with two."""
    record = SequenceRecord(memory, _GEOMETRY)
    record.begin(params)
    record.set_block_table([3, 4])
    record.append_token(11)
    record.publish(num_computed_tokens=4)
    record.append_token(12)
    record.append_page(9)
    record.publish(num_computed_tokens=5)
    return record


def test_a_fresh_record_has_nothing_to_read() -> None:
    record = SequenceRecord(_memory(), _GEOMETRY)
    assert record.read() is None
    assert record.summarize() is None


def test_everything_that_was_published_is_read_in_another_mapping(segment: Segment, params: SequenceParams) -> None:
    record = segment.record(5)
    record.begin(params)
    record.set_block_table([7, 8])
    record.append_token(99)
    record.publish(num_computed_tokens=4)

    snapshot = Segment.open(segment.path).record(5).read()

    assert snapshot is not None
    assert snapshot.params == params
    assert snapshot.output_token_ids == (99,)
    assert snapshot.block_table == (7, 8)
    assert snapshot.num_computed_tokens == 4
    assert snapshot.rng_position == 1
    assert segment.record(4).read() is None


@settings(deadline=None)  # other processes share the machine
@given(
    params=st.builds(
        SequenceParams,
        request_id=st.text("0123456789abcdef", min_size=1, max_size=64),
        attempt=st.builds(Attempt, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)),
        gateway_id=st.text("abcdef-0123456789", max_size=64),
        prompt_token_ids=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=200).map(tuple),
        sampling=st.builds(
            SamplingParams,
            temperature=st.floats(0, 2),
            top_k=st.integers(0, 2**32 - 1),
            top_p=st.floats(0, 1),
            seed=st.integers(0, 2**64 - 1),
            min_p=st.floats(0, 1),
            repetition_penalty=st.floats(0, 2, exclude_min=True),
            presence_penalty=st.floats(-2, 2),
            frequency_penalty=st.floats(-2, 2),
            logit_bias=st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=MAX_LOGIT_BIAS).map(
                lambda bias: tuple(sorted(bias.items()))
            ),
            logprobs=st.none() | st.integers(0, 20),
            prompt_logprobs=st.none() | st.integers(0, 20),
        ),
        stop=st.builds(
            StopRules,
            max_tokens=st.integers(1, 2**32 - 1),
            stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=MAX_STOP_TOKEN_IDS).map(tuple),
            min_tokens=st.integers(0, 2**32 - 1),
        ),
        num_reserved_pages=st.integers(0, 2**32 - 1),
        traceparent=st.text("0123456789abcdef-", max_size=55),
        scheduling=st.builds(
            SchedulingParams,
            lane_priority=st.integers(-(2**31), 2**31 - 1),
            rank=st.floats(allow_nan=False),
            itl_target_ms=st.integers(0, 2**32 - 1),
            predicted_output_tokens=st.floats(0, allow_infinity=False),
        ),
        decode_worker_id=st.text("abcdef-0123456789", max_size=64),
        keep_ms=st.integers(0, 3_600_000),
    ),
    output=st.lists(st.integers(0, 2**31 - 1), max_size=50),
    table=st.lists(st.integers(0, 39), max_size=16),
    # of calls of tools workers know nothing
    ending=st.none() | st.sampled_from([reason for reason in FinishReason if reason is not FinishReason.TOOL_CALLS]),
)
def test_facts_tokens_pages_and_end_come_back_as_they_were(
    params: SequenceParams, output: list[int], table: list[int], ending: FinishReason | None
) -> None:
    memory = _memory()
    record = SequenceRecord(memory, _GEOMETRY)
    record.begin(params)
    for token_id in output:
        record.append_token(token_id)
        record.publish(num_computed_tokens=len(params.prompt_token_ids))
    record.set_block_table(table[: len(table) // 2])
    for page_id in table[len(table) // 2 :]:
        record.append_page(page_id)
    record.publish(num_computed_tokens=len(params.prompt_token_ids))
    if ending is not None:
        record.end(ending)
    reader = SequenceRecord(memory, _GEOMETRY)
    snapshot, summary = reader.read(), reader.summarize()
    assert snapshot is not None
    assert summary is not None
    assert (snapshot.params, snapshot.output_token_ids) == (params, tuple(output))
    assert snapshot.finish_reason == summary.finish_reason == ending
    pages = [] if ending is not None else table
    assert list(snapshot.block_table) == summary.page_ids.tolist() == pages


def test_what_is_not_published_is_not_read(params: SequenceParams) -> None:
    memory = _memory()
    record = _published(memory, params)
    record.append_token(13)
    record.append_page(10)
    snapshot = SequenceRecord(memory, _GEOMETRY).read()
    assert snapshot is not None
    assert snapshot.output_token_ids == (11, 12)
    assert snapshot.block_table == (3, 4, 9)


@pytest.mark.parametrize("damage", ["torn", "flipped"])
def test_damage_at_any_byte_of_the_newer_header_leaves_the_older_one(params: SequenceParams, damage: str) -> None:
    memory = _memory()
    record = SequenceRecord(memory, _GEOMETRY)
    record.begin(params)
    record.append_token(11)
    record.publish(num_computed_tokens=4)
    older = SequenceRecord(memory, _GEOMETRY).read()
    before = bytes(memory)
    record.append_token(12)
    record.publish(num_computed_tokens=5)
    after = bytes(memory)
    start = next(i for i in (0, RECORD_HEADER_BYTES) if before[i : i + 64] != after[i : i + 64])
    newer = SequenceRecord(memory, _GEOMETRY).read()
    assert newer is not None
    assert newer.output_token_ids == (11, 12)

    num_torn = 0
    for byte in range(start, start + PACKED_HEADER_BYTES):
        memory[:] = after
        if damage == "flipped":
            memory[byte] ^= 0x40
        else:
            memory[byte : start + PACKED_HEADER_BYTES] = before[byte : start + PACKED_HEADER_BYTES]
            if bytes(memory) == after:
                continue  # the bytes from here on were the same before: nothing is torn
        num_torn += 1
        assert SequenceRecord(memory, _GEOMETRY).read() == older, f"byte {byte - start}"
    assert num_torn > 30


def test_another_object_goes_on_where_the_header_stands(params: SequenceParams) -> None:
    memory = _memory()
    _published(memory, params)
    receiver = SequenceRecord(memory, _GEOMETRY)
    assert receiver.read() is not None
    receiver.append_token(13)
    receiver.append_page(20)
    receiver.publish(num_computed_tokens=6)
    snapshot = SequenceRecord(memory, _GEOMETRY).read()
    assert snapshot is not None
    assert snapshot.params == params
    assert snapshot.output_token_ids == (11, 12, 13)
    assert snapshot.block_table == (3, 4, 9, 20)
    assert snapshot.rng_position == 3


def test_reading_does_not_take_back_what_its_writer_has_not_published_yet(params: SequenceParams) -> None:
    memory = _memory()
    record = _published(memory, params)
    record.append_token(13)
    record.read()
    record.publish(num_computed_tokens=6)
    snapshot = SequenceRecord(memory, _GEOMETRY).read()
    assert snapshot is not None
    assert snapshot.output_token_ids == (11, 12, 13)


def test_a_new_sequence_in_a_used_slot_hides_the_old_one_before_it_is_published(params: SequenceParams) -> None:
    memory = _memory()
    record = _published(memory, params)
    record.begin(replace(params, request_id="f" * 32))
    assert SequenceRecord(memory, _GEOMETRY).read() is None


def test_a_cleared_record_has_nothing_to_read_and_may_be_cleared_again(params: SequenceParams) -> None:
    memory = _memory()
    record = _published(memory, params)
    record.clear()
    record.clear()
    assert SequenceRecord(memory, _GEOMETRY).read() is None
    with pytest.raises(RuntimeError, match="begin"):
        record.append_token(1)


def test_the_summary_names_request_attempt_and_pages(params: SequenceParams) -> None:
    summary = _published(_memory(), params).summarize()
    assert summary is not None
    assert (summary.request_id, summary.attempt) == (params.request_id, params.attempt)
    assert summary.page_ids.tolist() == [3, 4, 9]


def test_a_published_block_table_cannot_change_but_grow(params: SequenceParams) -> None:
    record = _published(_memory(), params)
    with pytest.raises(ValueError, match="first 3 entries are published"):
        record.set_block_table([3, 5, 9])
    with pytest.raises(ValueError, match="first 3 entries are published"):
        record.set_block_table([3])
    record.set_block_table([3, 4, 9, 30])


def test_an_ended_record_has_its_tokens_and_no_pages_and_stays_so_for_whoever_goes_on_with_it(
    params: SequenceParams,
) -> None:
    memory = _memory()
    _published(memory, params).end(FinishReason.LENGTH)
    other = SequenceRecord(memory, _GEOMETRY)
    snapshot = other.read()
    assert snapshot is not None
    assert (snapshot.output_token_ids, snapshot.block_table, snapshot.num_computed_tokens) == ((11, 12), (), 0)
    other.publish(num_computed_tokens=0)
    again = SequenceRecord(memory, _GEOMETRY).read()
    assert again is not None
    assert again.finish_reason is FinishReason.LENGTH


def test_a_new_sequence_in_the_slot_of_an_ended_one_runs(params: SequenceParams) -> None:
    memory = _memory()
    record = _published(memory, params)
    record.end(FinishReason.STOP)
    record.begin(params)
    record.publish(num_computed_tokens=0)
    snapshot = SequenceRecord(memory, _GEOMETRY).read()
    assert snapshot is not None
    assert snapshot.finish_reason is None


def _published_in(segment: Segment, params: SequenceParams) -> tuple[SequenceRecord, memoryview]:
    """A record in a segment, and the bytes of all its parts from its token log on."""
    record = segment.record(2)
    record.begin(params)
    record.set_block_table([3, 4])
    record.append_token(11)
    record.publish(num_computed_tokens=4)
    layout = layout_of(segment.geometry)
    start = layout.records + 2 * layout.record_bytes + 2 * RECORD_HEADER_BYTES
    start += RECORD_PARAMS_BYTES + RECORD_LOGPROBS_BYTES
    return record, segment._memory[start : layout.records + 3 * layout.record_bytes]


@pytest.mark.parametrize("token", range(5))
def test_a_record_with_a_wrong_token_is_not_read_though_its_pages_are_known(
    segment: Segment, params: SequenceParams, token: int
) -> None:
    record, parts = _published_in(segment, params)
    parts[4 * token] ^= 1
    assert record.read() is None
    assert record.why_unreadable() == "the checksum of its 5 tokens is wrong"
    summary = record.summarize()
    assert summary is not None
    assert summary.page_ids.tolist() == [3, 4]
    parts[4 * token] ^= 1
    assert record.read() is not None
    assert record.why_unreadable() == ""


@pytest.mark.parametrize("page", range(2))
def test_a_record_with_a_wrong_page_is_neither_read_nor_summarized(
    segment: Segment, params: SequenceParams, page: int
) -> None:
    record, parts = _published_in(segment, params)
    parts[4 * (segment.geometry.max_context_tokens + page)] ^= 8  # a page that there is
    assert record.read() is None
    assert record.summarize() is None
    assert record.why_unreadable() == "the checksum of its block table of 2 pages is wrong"
    assert "no header" in segment.record(0).why_unreadable()


def test_dropped_pages_and_new_ones_in_their_place_keep_the_checksums_right(params: SequenceParams) -> None:
    memory = _memory()
    record = _published(memory, params)
    record.drop_pages(1)
    dropped = SequenceRecord(memory, _GEOMETRY).read()
    assert dropped is not None
    assert dropped.block_table == (3,)
    record.set_block_table([3, 20, 21])
    record.append_page(22)
    record.append_token(13)
    record.publish(num_computed_tokens=6)
    reader = SequenceRecord(memory, _GEOMETRY)
    snapshot = reader.read()
    assert snapshot is not None
    assert (snapshot.block_table, snapshot.output_token_ids) == ((3, 20, 21, 22), (11, 12, 13))
    reader.append_token(14)
    reader.append_page(23)
    reader.publish(num_computed_tokens=7)
    gone_on = SequenceRecord(memory, _GEOMETRY).read()
    assert gone_on is not None
    assert (gone_on.block_table[-1], gone_on.output_token_ids[-1]) == (23, 14)


def test_bounds_are_told_with_field_value_and_limit(params: SequenceParams) -> None:
    record = SequenceRecord(_memory(), _GEOMETRY)
    with pytest.raises(ValueError, match=r"prompt_token_ids: 257 ids, allowed are 1 to 256"):
        record.begin(replace(params, prompt_token_ids=(1,) * 257))
    with pytest.raises(ValueError, match="stop_token_ids: 65 ids, a record holds at most 64"):
        record.begin(replace(params, stop=StopRules(1, tuple(range(65)))))
    with pytest.raises(ValueError, match="logit_bias: 301 ids, a record holds at most 300"):
        record.begin(replace(params, sampling=SamplingParams(logit_bias=tuple((i, 1.0) for i in range(301)))))
    for field in ("request_id", "decode_worker_id"):
        with pytest.raises(ValueError, match=rf"{field} .*65 bytes, a record holds at most 64"):
            record.begin(replace(params, **{field: "x" * 65}))  # type: ignore[arg-type]  # the names of two texts
    record.begin(replace(params, prompt_token_ids=(1,) * 256))
    with pytest.raises(ValueError, match="token log is full"):
        record.append_token(1)
    with pytest.raises(ValueError, match="page 40: this arena has pages 0 to 39"):
        record.append_page(40)
    with pytest.raises(ValueError, match="num_computed_tokens 257: allowed are 0 to 256"):
        record.publish(257)
    record.set_block_table(list(range(16)))
    with pytest.raises(ValueError, match="block table is full"):
        record.append_page(1)


def test_a_segment_has_no_record_beyond_its_slots(tmp_path: Path) -> None:
    segment = Segment.create(tmp_path / "arena", _GEOMETRY, "digest")
    with pytest.raises(IndexError, match="slot 1: this arena has 1"):
        segment.record(1)
    segment.close()


def test_every_sampling_parameter_is_kept(params: SequenceParams) -> None:
    """Also one that was added after this test: a parameter that a record loses is lost by an adoption."""
    number: dict[object, float] = {float: 0.5, int: 3, int | None: 4}
    values = {field.name: number[field.type] for field in fields(SamplingParams) if field.type in number}
    sampling = SamplingParams(**values, logit_bias=((7, 1.5),))  # type: ignore[arg-type]  # each of its field's type
    assert values.keys() | {"logit_bias", "grammar"} == {field.name for field in fields(SamplingParams)}
    memory = _memory()
    _published(memory, replace(params, sampling=sampling))
    snapshot = SequenceRecord(memory, _GEOMETRY).read()
    assert snapshot is not None
    assert snapshot.params.sampling == sampling


def test_the_packed_form_changes_only_with_the_version_of_the_layout() -> None:
    """Who changes it raises LAYOUT_VERSION here and there: two forms must not read each other."""
    form = (record_format._LENGTHS.format, record_format._PARAMS.format)
    assert (LAYOUT_VERSION, *form) == (11, "<QIIIIIIIQIIIII", "<64s64s64s64s6dQIIIIiiiII16sdIdII")

"""An adopter finds the log-probabilities of the newest tokens in the record, and knows which it does not have."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weir.core.sampling import SamplingParams, TokenLogprobs
from weir.kv.geometry import ArenaGeometry
from weir.kv.layout import RECORD_LOGPROBS_BYTES, layout_of
from weir.kv.records.format import LOGPROBS_BYTES, MAX_KEPT_LOGPROBS, LogprobRing
from weir.kv.records.record import SequenceParams, SequenceRecord

_GEOMETRY = ArenaGeometry(page_bytes=4096, num_pages=40, num_slots=1, max_context_tokens=256)
FLOATS = st.floats(-100, 0, width=32)
TOKEN_IDS = st.integers(0, 2**31 - 1)


@pytest.fixture
def asking(params: SequenceParams) -> SequenceParams:
    return replace(params, sampling=SamplingParams(logprobs=2))


def told_of(index: int) -> TokenLogprobs:
    return TokenLogprobs(index + 100, -index / 8, index + 1, ((index, -0.5), (index + 1, -1.0)))


def write(memory: memoryview, params: SequenceParams, num_tokens: int) -> SequenceRecord:
    record = SequenceRecord(memory, _GEOMETRY)
    record.begin(params)
    for index in range(num_tokens):
        record.keep_logprobs(index, told_of(index))
        record.append_token(index + 100)
        record.publish(len(params.prompt_token_ids) + index)
    return record


def fresh_memory() -> memoryview:
    return memoryview(bytearray(layout_of(_GEOMETRY).record_bytes))


@pytest.mark.parametrize("num_tokens", [0, 1, MAX_KEPT_LOGPROBS, MAX_KEPT_LOGPROBS + 1, 30])
def test_the_newest_are_read_in_another_mapping_and_older_ones_are_unknown(
    asking: SequenceParams, num_tokens: int
) -> None:
    memory = fresh_memory()
    write(memory, asking, num_tokens)
    snapshot = SequenceRecord(memory, _GEOMETRY).read()
    if num_tokens == 0:
        assert snapshot is None
        return
    assert snapshot is not None
    num_lost = max(0, num_tokens - MAX_KEPT_LOGPROBS)
    unknown = [TokenLogprobs.unknown(index + 100) for index in range(num_lost)]
    assert list(snapshot.output_logprobs) == unknown + [told_of(index) for index in range(num_lost, num_tokens)]


def test_what_was_kept_for_a_token_that_was_not_published_is_not_read(asking: SequenceParams) -> None:
    memory = fresh_memory()
    record = write(memory, asking, 3)
    record.keep_logprobs(3, told_of(3))
    snapshot = SequenceRecord(memory, _GEOMETRY).read()
    assert snapshot is not None
    assert snapshot.output_logprobs == tuple(told_of(index) for index in range(3))


def test_a_new_sequence_in_a_used_slot_has_none_of_the_old_ones(asking: SequenceParams) -> None:
    memory = fresh_memory()
    write(memory, asking, 5)
    record = SequenceRecord(memory, _GEOMETRY)
    record.begin(asking)
    record.append_token(7)
    record.publish(4)
    snapshot = SequenceRecord(memory, _GEOMETRY).read()
    assert snapshot is not None
    assert snapshot.output_logprobs == (TokenLogprobs.unknown(7),)


def test_a_sequence_that_did_not_ask_has_none(params: SequenceParams) -> None:
    memory = fresh_memory()
    record = SequenceRecord(memory, _GEOMETRY)
    record.begin(params)
    record.append_token(7)
    record.publish(4)
    snapshot = record.read()
    assert snapshot is not None
    assert snapshot.output_logprobs == ()


@settings(deadline=None)
@given(
    entries=st.lists(
        st.builds(
            TokenLogprobs, TOKEN_IDS, FLOATS, TOKEN_IDS, st.lists(st.tuples(TOKEN_IDS, FLOATS), max_size=20).map(tuple)
        ),
        min_size=1,
        max_size=MAX_KEPT_LOGPROBS,
    )
)
def test_every_value_comes_back_as_it_was(entries: list[TokenLogprobs]) -> None:
    ring = LogprobRing(memoryview(bytearray(RECORD_LOGPROBS_BYTES)))
    ring.clear()
    for index, entry in enumerate(entries):
        ring.keep(index, entry)
    assert ring.read([entry.token_id for entry in entries]) == tuple(entries)


def test_a_death_in_the_middle_of_an_entry_leaves_it_unknown() -> None:
    ring = LogprobRing(memoryview(bytearray(RECORD_LOGPROBS_BYTES)))
    ring.clear()
    for index in range(MAX_KEPT_LOGPROBS):
        ring.keep(index, told_of(index))
    with pytest.raises(ValueError, match="broadcast"):  # more than an entry holds: it breaks off where a death could
        ring.keep(MAX_KEPT_LOGPROBS, TokenLogprobs(7, -1.0, 1, ((1, -1.0),) * 21))
    token_ids = [index + 100 for index in range(MAX_KEPT_LOGPROBS + 1)]
    kept = [told_of(index) for index in range(1, MAX_KEPT_LOGPROBS)]
    assert ring.read(token_ids) == (TokenLogprobs.unknown(100), *kept, TokenLogprobs.unknown(token_ids[-1]))


def test_the_ring_fits_its_place_in_the_record() -> None:
    assert LOGPROBS_BYTES <= RECORD_LOGPROBS_BYTES

"""Records keep the grammar that an answer is held to, or are not read."""

from dataclasses import replace

import pytest

from weir.core.grammar import GRAMMAR_KINDS, MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from weir.kv.arena.segment import Segment
from weir.kv.geometry import ArenaGeometry
from weir.kv.layout import layout_of
from weir.kv.records.record import SequenceParams, SequenceRecord


@pytest.mark.parametrize("kind", GRAMMAR_KINDS)
def test_a_grammar_is_kept_in_the_annex(segment: Segment, params: SequenceParams, kind: GrammarKind) -> None:
    grammar = Grammar(kind, "é" * (MAX_GRAMMAR_BYTES // 2))
    sampling = replace(params.sampling, grammar=grammar)
    record = segment.record(3)
    record.begin(replace(params, sampling=sampling))
    record.append_token(99)
    record.publish(num_computed_tokens=4)
    snapshot = Segment.open(segment.path).record(3).read()
    assert snapshot is not None
    assert snapshot.params.sampling == sampling
    record.begin(params)
    record.publish(num_computed_tokens=0)
    later = Segment.open(segment.path).record(3).read()
    assert later is not None
    assert later.params.sampling.grammar is None


def test_a_record_without_the_grammar_that_it_should_have_is_not_read(segment: Segment, params: SequenceParams) -> None:
    """Else its sequence would go on as a free one."""
    record = segment.record(3)
    record.begin(replace(params, sampling=replace(params.sampling, grammar=Grammar("regex", "a+"))))
    record.publish(num_computed_tokens=0)
    segment.annex(3).clear()
    assert segment.record(3).read() is None
    assert segment.record(3).why_unreadable() == "its annex, which should have the source of a grammar, is empty"


def test_a_record_without_an_annex_takes_no_grammar(params: SequenceParams) -> None:
    geometry = ArenaGeometry(page_bytes=4096, num_pages=40, num_slots=1, max_context_tokens=256)
    record = SequenceRecord(memoryview(bytearray(layout_of(geometry).record_bytes)), geometry)
    with pytest.raises(ValueError, match="no annex to keep it in"):
        record.begin(replace(params, sampling=replace(params.sampling, grammar=Grammar("regex", "a+"))))

"""Handed-off sequences as they arrive: in a slot of the arena, with a record and pages."""

from weir.engine.messages import Arrival, PageBundle
from weir.kv.arena.segment import Segment
from weir.kv.messages import HandedOff


class UnreadableRecord(Exception):
    """The record of a handed-off sequence is not there, or is that of another one: a defect."""


def read_arrival(segment: Segment, handed_off: HandedOff) -> Arrival:
    """The sequence as its record has it; who gets the arrival goes on writing its record. Raises UnreadableRecord."""
    record = segment.record(handed_off.slot)
    snapshot = record.read()
    if snapshot is None:
        raise UnreadableRecord(f"request {handed_off.request_id}: slot {handed_off.slot} has no valid record")
    params = snapshot.params
    if (params.request_id, params.attempt) != (handed_off.request_id, handed_off.attempt):
        raise UnreadableRecord(
            f"request {handed_off.request_id}, {handed_off.attempt}: "
            f"slot {handed_off.slot} has {params.request_id}, {params.attempt}"
        )
    return Arrival(
        params=params,
        slot=handed_off.slot,
        log=record,
        output_token_ids=snapshot.output_token_ids,
        output_logprobs=snapshot.output_logprobs,
        block_table=snapshot.block_table,
        num_computed_tokens=snapshot.num_computed_tokens,
    )


def pages_of(segment: Segment, handed_off: HandedOff) -> PageBundle:
    """Slot and pages of a handed-off sequence, to be given back. The slot alone if its record is not readable."""
    summary = segment.record(handed_off.slot).summarize()
    page_ids = () if summary is None else tuple(summary.page_ids.tolist())
    return PageBundle(page_ids, (handed_off.slot,))

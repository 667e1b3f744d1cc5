"""Sequences that run, as their records in the arena say: found by their requests, pages shared before they end.

Pure. A record is written by its worker while it is read here: what is not whole is not there, for now.
"""

from collections.abc import Sequence

import numpy as np

from weir.kv.arena.ownership import NotOwned, OwnershipTable
from weir.kv.geometry import PAGE_TOKENS
from weir.kv.layout import SlotState
from weir.kv.messages import PageChain
from weir.kv.prefixes import page_hashes
from weir.kv.records.format import SequenceSnapshot
from weir.kv.records.record import SequenceRecord
from weir_transfer.pending_prefixes import PendingPrefixes


class RunningSequences:
    """Of one arena."""

    def __init__(
        self,
        table: OwnershipTable,
        records: Sequence[SequenceRecord],
        pending: PendingPrefixes,
        *,
        keeps_prefixes: bool,
    ) -> None:
        self._table = table
        self._records = records
        self._pending = pending
        self._keeps_prefixes = keeps_prefixes

    def find(self, request_id: str) -> int | None:
        """The slot of the request's newest attempt; None: it is not here, or has ended."""
        found = []
        for slot in np.flatnonzero(self._table.slot_rows["state"] == SlotState.LEASED).tolist():
            summary = self._records[slot].summarize()
            if summary is not None and summary.request_id == request_id and summary.finish_reason is None:
                found.append((summary.attempt, slot))
        return max(found)[1] if found else None

    def num_full_pages(self, slot: int, request_id: str) -> int | None:
        """That its sequence has filled; None: it is another one's by now. Quick."""
        summary = self._records[slot].summarize()
        if summary is None or summary.request_id != request_id or summary.finish_reason is not None:
            return None
        return summary.num_computed_tokens // PAGE_TOKENS

    def try_seal(self, slot: int, request_id: str) -> tuple[bytes, ...] | None:
        """Lets others use the full pages of a sequence that goes on, under its own seed as at its end. The hashes of
        these pages, from its first one on; none: they are not to be shared. None: look again."""
        snapshot = self._records[slot].read()
        if snapshot is None or snapshot.params.request_id != request_id:
            return None
        hashes = self.hashes_of(snapshot)
        held = snapshot.held_pages[: max(0, len(hashes) - snapshot.first_page)]
        try:
            self._table.seal(self._table.owner_of(slot), PageChain.of_sequence(held, snapshot.first_page, hashes))
        except NotOwned:  # its worker is giving them back
            return None
        self._pending.settle(hashes)
        return hashes

    def chain_of(self, slot: int) -> PageChain:
        """The pages of a dead worker's sequence, as its record has them; none if it died of having damaged that."""
        snapshot = self._records[slot].read()
        hashes = () if snapshot is None else self.hashes_of(snapshot)
        if snapshot is None or not hashes:
            return PageChain(())
        return PageChain.of_sequence(snapshot.held_pages, snapshot.first_page, hashes)

    def hashes_of(self, snapshot: SequenceSnapshot) -> tuple[bytes, ...]:
        """Of its full pages; none if they are not to be shared, or its block table is damaged."""
        page_ids, seed = snapshot.held_pages, snapshot.params.prefix_seed
        if not (self._keeps_prefixes and seed) or len(set(page_ids)) < len(page_ids):
            return ()
        token_ids = (*snapshot.params.prompt_token_ids, *snapshot.output_token_ids)
        return page_hashes(token_ids[: snapshot.num_computed_tokens], seed)

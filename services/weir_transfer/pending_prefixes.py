"""Prefixes that are being computed now: another match of the same pages waits instead of computing them too."""

from collections.abc import Callable, Iterable, Sequence

from weir.kv.layout import TRANSFER_LEASE
from weir_transfer.page_tier import PrefillMeter

WAIT_FROM_PAGES = 4
"""Fewer are computed sooner than waited for."""


class PendingPrefixes:
    """Each pending hash belongs to one match of one lease, which will seal the page, or gives up.

    Only in memory: after a restart nothing is pending, and some pages may be computed twice.
    """

    def __init__(self, on_settled: Callable[[], None]) -> None:
        """`on_settled` is called after anything stopped being pending."""
        self._on_settled = on_settled
        self._meter: PrefillMeter | None = None
        self._match_of: dict[bytes, int] = {}
        self._hashes_of: dict[int, set[bytes]] = {}
        self._lease_of: dict[int, int] = {}
        self._next_match_id = 1

    def __len__(self) -> int:
        return len(self._match_of)

    def __contains__(self, page_hash: bytes) -> bool:
        return page_hash in self._match_of

    def measure_by(self, meter: PrefillMeter) -> None:
        """`meter` is told of what leases compute from now on."""
        self._meter = meter

    def num_leading(self, hashes: Sequence[bytes]) -> int:
        """How many of the first `hashes` are pending."""
        return next((index for index, page_hash in enumerate(hashes) if page_hash not in self._match_of), len(hashes))

    def is_computed_here(self, page_hash: bytes, *, besides: int) -> bool:
        """Whether a match of another lease than `besides` is about to seal it."""
        match_id = self._match_of.get(page_hash)
        return match_id is not None and self._lease_of[match_id] != besides

    def declare(self, lease_id: int, hashes: Iterable[bytes]) -> int:
        """The lease is going to compute those that are not pending already. The match's id; 0 if there are none."""
        new = {page_hash for page_hash in hashes if page_hash not in self._match_of}
        if not new:
            return 0
        match_id = self._next_match_id
        self._next_match_id += 1
        self._match_of.update(dict.fromkeys(new, match_id))
        self._hashes_of[match_id] = new
        self._lease_of[match_id] = lease_id
        if self._meter is not None and lease_id != TRANSFER_LEASE:
            self._meter.begin(match_id)
        return match_id

    def settle(self, hashes: Iterable[bytes]) -> None:
        """These are in the index now."""
        settled = [page_hash for page_hash in hashes if page_hash in self._match_of]
        for page_hash in settled:
            match_id = self._match_of.pop(page_hash)
            self._hashes_of[match_id].discard(page_hash)
            is_whole = not self._hashes_of[match_id]
            if is_whole:
                del self._hashes_of[match_id], self._lease_of[match_id]
            if self._meter is not None:
                self._meter.add_page(match_id, is_last=is_whole)
        if settled:
            self._on_settled()

    def give_up(self, lease_id: int, match_ids: Iterable[int]) -> None:
        """Their requests have ended. What is not pending, or not the lease's, is ignored: it may be settled already."""
        for match_id in match_ids:
            if self._lease_of.get(match_id) == lease_id:
                if self._meter is not None:
                    self._meter.drop(match_id)
                self.settle(tuple(self._hashes_of[match_id]))

    def give_up_all(self, lease_id: int) -> None:
        """The lease has ended, or its worker may not know of its matches."""
        self.give_up(lease_id, [match_id for match_id, owner in self._lease_of.items() if owner == lease_id])

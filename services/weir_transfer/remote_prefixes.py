"""Prefixes that pass between this arena and those of other hosts, or come from files: what is pinned for others, and
what is reserved for those that come.

Pure. Pages belong to `TRANSFER_LEASE` meanwhile, which is no worker's and in no lease table: a start frees what an
earlier process had reserved.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from weir.kv.arena.ownership import OwnershipTable
from weir.kv.layout import TRANSFER_LEASE
from weir.kv.messages import PageChain
from weir.kv.movers.pull import PullFigures
from weir_transfer.page_tier import PrefillMeter
from weir_transfer.pending_prefixes import PendingPrefixes

MAX_SHARE = 0.25
"""Of the arena's pages, for what is on its way here, and as many for what is pinned: for others, and of sequences that
come here."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Pages for a part of a prefix. `hashes`: of the part; `earlier_hashes`: of the pages before it, which are here."""

    match_id: int
    page_ids: tuple[int, ...]
    hashes: tuple[bytes, ...]
    earlier_hashes: tuple[bytes, ...]


@dataclass(slots=True)
class RemoteCounters:
    """Since the start of this process."""

    remote_prefixes_total: int = 0
    remote_prefixes_failed_total: int = 0
    remote_pages_received_total: int = 0
    remote_pages_wrong_total: int = 0
    remote_streams_broken_total: int = 0
    remote_busy_seconds_total: float = 0.0
    remote_pages_offered_total: int = 0
    remote_pages_direct_total: int = 0


class RemotePrefixes:
    """Of one arena."""

    def __init__(self, table: OwnershipTable, pending: PendingPrefixes, *, may_evict: Callable[[], bool]) -> None:
        self._may_evict = may_evict
        self._table = table
        self._pending = pending
        self._max_pages = int(MAX_SHARE * len(table.page_rows))
        self._num_reserved = 0
        self._num_pinned = 0
        self.counters = RemoteCounters()

    def measure_by(self, meter: PrefillMeter) -> None:
        """`meter` is told of what workers compute from now on."""
        self._pending.measure_by(meter)

    @property
    def num_reservable(self) -> int:
        """Pages for which there is room among those that may be reserved."""
        return max(0, self._max_pages - self._num_reserved)

    def metrics(self) -> Mapping[str, float]:
        counters = {name: float(value) for name, value in asdict(self.counters).items()}
        return {
            **counters,
            "remote_pages_reserved": float(self._num_reserved),
            "remote_pages_pinned": float(self._num_pinned),
        }

    def pin(self, hashes: Sequence[bytes], num_held: int) -> tuple[int, ...]:
        """The cached pages of this prefix behind the first `num_held`, as many as may be pinned for others. They stay
        as they are until `unpin`."""
        pages = self.keep(hashes, num_held)
        self.counters.remote_pages_offered_total += len(pages)
        return pages

    def keep(self, hashes: Sequence[bytes], num_held: int) -> tuple[int, ...]:
        """The same for somebody of this host."""
        pages = self._table.prefixes.find_prefix(hashes)[num_held:][: max(0, self._max_pages - self._num_pinned)]
        self._table.prefixes.pin(TRANSFER_LEASE, np.array(pages, np.int64))
        self._num_pinned += len(pages)
        return tuple(pages)

    def is_next_coming(self, hashes: Sequence[bytes], num_offered: int) -> bool:
        """Whether the page behind the first `num_offered` is being computed here. What is on its way from another host
        is not waited for: that one may wait for this one."""
        following = hashes[num_offered : num_offered + 1]
        return any(self._pending.is_computed_here(one, besides=TRANSFER_LEASE) for one in following)

    def unpin(self, page_ids: Sequence[int]) -> None:
        self._table.prefixes.unpin(TRANSFER_LEASE, np.array(page_ids, np.int64))
        self._num_pinned -= len(page_ids)

    def num_held(self, hashes: Sequence[bytes]) -> int:
        """First pages of the prefix that are here, or are being computed or brought here."""
        num_cached = len(self._table.prefixes.find_prefix(hashes))
        return num_cached + self._pending.num_leading(hashes[num_cached:])

    def try_count_cached(self, hashes: Sequence[bytes]) -> int | None:
        """First pages of the prefix that are here. None: the next one is on its way, or being computed."""
        num_cached = len(self._table.prefixes.find_prefix(hashes))
        return None if self._pending.num_leading(hashes[num_cached : num_cached + 1]) else num_cached

    def is_coming(self, hashes: Sequence[bytes]) -> bool:
        """Whether any of these is being computed, or brought here."""
        return any(page_hash in self._pending for page_hash in hashes)

    def try_reserve(self, hashes: Sequence[bytes]) -> Reservation | None:
        """Room for what is not here of this prefix, all of which is expected from here on: whoever wants it waits.
        None: there is too little, or nothing is missing."""
        num_held = self.num_held(hashes)
        missing = tuple(hashes[num_held:])
        if not missing or len(missing) > self.num_reservable:
            return None
        acquired = self._table.try_acquire(TRANSFER_LEASE, len(missing), 0, may_evict=self._may_evict())
        if acquired is None:
            return None
        self._num_reserved += len(missing)
        match_id = self._pending.declare(TRANSFER_LEASE, missing)
        return Reservation(match_id, acquired.page_ids, missing, tuple(hashes[:num_held]))

    def abandon(self, reservation: Reservation) -> None:
        """Nobody is to wait for it any more; it is settled later."""
        self._pending.give_up(TRANSFER_LEASE, [reservation.match_id])

    def settle(self, reservation: Reservation, num_pages: int) -> None:
        """The first `num_pages` are here, as they were, and cached from now on; the others are not coming, and nobody
        writes into their pages any more."""
        chain = PageChain(reservation.page_ids, reservation.hashes[:num_pages], reservation.earlier_hashes)
        self._table.release(TRANSFER_LEASE, [chain], [])
        self._num_reserved -= len(reservation.page_ids)
        self._pending.settle(reservation.hashes[:num_pages])
        self.abandon(reservation)

    def count_received(self, num_received: int, figures: PullFigures, *, has_failed: bool) -> None:
        """Pages of a prefix that another host was to send. One that has less than the prompt, and sends it, has not
        failed. `figures`: of the pull."""
        self.counters.remote_prefixes_total += 1
        self.counters.remote_prefixes_failed_total += has_failed or not num_received
        self.counters.remote_pages_received_total += num_received
        self.count_pull(figures)

    def count_staged(self, num_pages: int) -> None:
        """Pages that came of a sequence that runs at another host."""
        self.counters.remote_pages_received_total += num_pages

    def count_pull(self, figures: PullFigures) -> None:
        """What went wrong, and how long it took, once it has ended."""
        self.counters.remote_pages_wrong_total += figures.num_wrong
        self.counters.remote_streams_broken_total += figures.num_breaks
        self.counters.remote_busy_seconds_total += figures.busy_s
        self.counters.remote_pages_direct_total += figures.num_direct

"""The seam of a tier: pages by their hash, of one layout."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from weir.kv.memory.page_access import PagePlace
from weir.kv.movers.pipes import Buffer


@dataclass(slots=True)
class StoreCounters:
    """Since the start of this process, by what this process did or found."""

    evicted_total: int = 0
    damaged_total: int = 0
    missing_total: int = 0
    failed_reads_total: int = 0


class PageStore(Protocol):
    """What was put may be gone at any time; what `try_get` gives is as it was put.

    One thread writes (`refresh`, `try_put`) while others read.
    """

    counters: StoreCounters

    @property
    def is_away(self) -> bool:
        """Nothing is got from it now, nor put there; what is known of it stays known."""
        ...

    @property
    def num_pages(self) -> int:
        """That are known."""
        ...

    @property
    def num_bytes(self) -> int:
        """Of all that the bound of this store counts, as far as it is known."""
        ...

    def __contains__(self, page_hash: bytes) -> bool:
        """By what is known here and now, at no cost."""
        ...

    def num_leading(self, hashes: Sequence[bytes]) -> int:
        """How many of the first `hashes` can be got, as far as is known here and now."""
        ...

    def refresh(self) -> None:
        """Learns what others have put and removed. May take long."""
        ...

    def try_put(self, page_hash: bytes, page: Buffer) -> bool:
        """False: it was there already. Where too much would be there, what was used longest ago goes. Raises OSError;
        the page is not there then, and all else is as it was."""
        ...

    def try_get(self, page_hash: bytes, place: PagePlace) -> bool:
        """False: it is not there, or not as it was put; the bytes of `place` mean nothing then. Raises PageMemoryAway,
        of `place`."""
        ...

    def touch(self, hashes: Iterable[bytes]) -> None:
        """The prefix `hashes` was used now. Of what was used at one time its end goes first."""
        ...

    def close(self) -> None:
        """For when nobody reads or writes any more. What was put stays, where it outlives this process."""
        ...

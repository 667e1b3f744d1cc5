"""What one tenant may hold of room that all share, so that something is left for whoever comes next."""

from collections import Counter
from typing import NamedTuple, Protocol

_FACTOR = 4
"""A tenant may hold this many times what is left: 4/5 of all alone, and less the more others hold."""


class Holder(Protocol):
    """Who holds room: callers, by their tenant."""

    @property
    def tenant(self) -> str: ...

    @property
    def has_peers(self) -> bool:
        """Whether another tenant has a key too, so that something has to be left for it."""
        ...


class Nobody(NamedTuple):
    """Who holds room that no tenant is told from another in."""

    tenant: str = ""
    has_peers: bool = False


NOBODY = Nobody()


def has_share(num_own: int, num: int, num_left: int, num_sure: int) -> bool:
    """Whether `num` more, of the `num_left` that are free, leave a tenant within its share. `num_sure`: so many it may
    hold whatever others do."""
    return num_own + num <= max(_FACTOR * (num_left - num), num_sure)


class SharedRoom:
    """How much of `size` is taken, and by whom. Refuses nobody itself: who takes has asked whether it may."""

    def __init__(self, size: int, num_sure: int) -> None:
        self.size = size
        self._num_sure = num_sure
        self._num_taken: Counter[str] = Counter()
        """By tenant."""
        self._num_taken_by_all = 0

    @property
    def num_taken(self) -> int:
        return self._num_taken_by_all

    def num_of(self, holder: Holder) -> int:
        """Taken by its tenant."""
        return self._num_taken[holder.tenant]

    def fits(self, num: int) -> bool:
        return self._num_taken_by_all + num <= self.size

    def within_share(self, holder: Holder, num: int) -> bool:
        """Whether `num` more leave something for the holder's peers; it may be that they do not fit all the same."""
        num_left = self.size - self._num_taken_by_all
        return not holder.has_peers or has_share(self.num_of(holder), num, num_left, self._num_sure)

    def take(self, holder: Holder, num: int) -> None:
        self._num_taken[holder.tenant] += num
        self._num_taken_by_all += num

    def give_back(self, holder: Holder, num: int) -> None:
        self._num_taken_by_all -= num
        self._num_taken[holder.tenant] -= num
        if not self._num_taken[holder.tenant]:
            del self._num_taken[holder.tenant]

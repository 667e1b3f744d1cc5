"""What one tenant may hold of room that all share, so that something is left for whoever comes next."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from weir.core.errors import Overloaded, QuotaExceeded

SHARE_BOUND = "tenant_share"
"""The bound that a QuotaExceeded names where a tenant has its share of what all share."""
_RETRY_AFTER_S = 1.0
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
    """How much of `size` is taken, and by whom. `of_what`: what there are so many of, for errors."""

    def __init__(self, size: int, num_sure: int, of_what: str) -> None:
        self.size = size
        self._of_what = of_what
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

    @contextmanager
    def held(self, holder: Holder, num: int) -> Iterator[None]:
        """While `num` more are taken. Raises Overloaded where they do not fit, and else QuotaExceeded where they are
        over the share of the holder's tenant."""
        if not self.fits(num):
            raise self.full()
        if not self.within_share(holder, num):
            raise self.over_share(holder)
        self.take(holder, num)
        try:
            yield
        finally:
            self.give_back(holder, num)

    def full(self) -> Overloaded:
        """For whom there is no room."""
        message = f"{self._num_taken_by_all} of the {self.size} {self._of_what} are taken; try again later"
        return Overloaded(message, retry_after_s=_RETRY_AFTER_S)

    def over_share(self, holder: Holder) -> QuotaExceeded:
        """For who may have no more of it."""
        message = (
            f"tenant {holder.tenant}: it has {self.num_of(holder)} of the {self.size} {self._of_what}, which is its "
            "share of them; try again later"
        )
        return QuotaExceeded(message, retry_after_s=_RETRY_AFTER_S, tenant=holder.tenant, bound=SHARE_BOUND)

    def take(self, holder: Holder, num: int) -> None:
        """Whether or not it may."""
        self._num_taken[holder.tenant] += num
        self._num_taken_by_all += num

    def give_back(self, holder: Holder, num: int) -> None:
        self._num_taken_by_all -= num
        self._num_taken[holder.tenant] -= num
        if not self._num_taken[holder.tenant]:
            del self._num_taken[holder.tenant]

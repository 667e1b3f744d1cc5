"""Tenants take turns where several wait for the same: of each its first, then again of whose turn is longest ago."""

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Generic, TypeVar

_ItemT = TypeVar("_ItemT")


class TurnQueue(Generic[_ItemT]):
    """What waits, by tenant: of one tenant first come, first served."""

    def __init__(self) -> None:
        self._by_tenant: OrderedDict[str, deque[_ItemT]] = OrderedDict()
        """In the order of their turns; of tenants that have something waiting."""

    def __len__(self) -> int:
        return sum(map(len, self._by_tenant.values()))

    def add(self, tenant: str, item: _ItemT) -> None:
        self._by_tenant.setdefault(tenant, deque()).append(item)

    def heads(self) -> Iterator[tuple[str, _ItemT]]:
        """Each tenant with its first, in the order of their turns; not to be gone on with after a change."""
        return ((tenant, items[0]) for tenant, items in self._by_tenant.items())

    def try_head(self, tenant: str) -> _ItemT | None:
        """The tenant's first. None: it has nothing waiting."""
        items = self._by_tenant.get(tenant)
        return items[0] if items else None

    def pop(self, tenant: str) -> _ItemT:
        """The tenant's first; it is the last then to have another turn."""
        item = self._by_tenant[tenant].popleft()
        if self._by_tenant[tenant]:
            self._by_tenant.move_to_end(tenant)
        else:
            del self._by_tenant[tenant]
        return item

    def try_remove(self, tenant: str, item: _ItemT) -> bool:
        """False: it does not wait any more."""
        items = self._by_tenant.get(tenant)
        if items is None or item not in items:
            return False
        items.remove(item)
        if not items:
            del self._by_tenant[tenant]
        return True

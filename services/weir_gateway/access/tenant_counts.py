"""What each tenant had: counters by name, bounded however often tenants come and go."""

from collections import Counter

MAX_TENANTS = 256
"""Counted by name; whoever comes after so many is counted as `other`."""
_OTHER = "other"


class TenantCounts:
    """Counters of tenants. Names are those of the limits file, never of a client's choosing."""

    def __init__(self, *, max_tenants: int = MAX_TENANTS) -> None:
        self._max_tenants = max_tenants
        self._tenants: set[str] = set()
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, tenant: str, what: str, amount: int) -> None:
        if tenant not in self._tenants:
            if len(self._tenants) >= self._max_tenants:
                tenant = _OTHER
            else:
                self._tenants.add(tenant)
        self._counts[what, tenant] += amount

    def metrics(self) -> dict[str, float]:
        """By names such as `tenant_finished_total{tenant="acme"}`."""
        return {
            f'tenant_{what}_total{{tenant="{tenant}"}}': float(count) for (what, tenant), count in self._counts.items()
        }

"""What tenants have been served and have used up, kept for the next leader: one entry for each model and lane, and one
for all quotas."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TenantCounter:
    """Tokens by their price over the tenant's weight; it only rises."""

    tenant: str
    value: float


@dataclass(frozen=True, slots=True)
class LaneCounters:
    """Tenants that share the workers of one model in one lane."""

    model: str
    lane: str
    counters: tuple[TenantCounter, ...]


@dataclass(frozen=True, slots=True)
class TenantDebt:
    """Seconds from when it was told until the tenant's buckets are full again."""

    tenant: str
    requests_s: float
    tokens_s: float


@dataclass(frozen=True, slots=True)
class QuotaDebts:
    """Of tenants whose buckets are not full; `told_at_s` is Unix time."""

    told_at_s: float
    debts: tuple[TenantDebt, ...]

"""What tenants have been served, kept for the next leader: one entry for each model and lane."""

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

"""What the scheduler tells gateways of its queues, so that they refuse whom it would refuse, and of quotas."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QuotaLevel:
    """What is left of a tenant's quotas, when its request was granted or refused. Below 0: being paid off."""

    requests_per_min: float = 0.0
    """0.0: not bounded; the same of tokens."""
    requests_left: float = 0.0
    tokens_per_min: float = 0.0
    tokens_left: float = 0.0


@dataclass(frozen=True, slots=True)
class TenantQueue:
    """How many requests of a tenant wait."""

    tenant: str
    """Empty: of all, where tenants do not take turns."""
    num_queued: int
    max_queued: int = 0
    """Its bound, where there is one."""


@dataclass(frozen=True, slots=True)
class LaneReport:
    """Requests of one model that wait in one lane, or would."""

    model: str
    lane: str
    num_queued: int
    num_queued_of_all_models: int
    """What `max_queued` bounds."""
    max_queued: int
    max_wait_s: float
    s_per_request: float
    """Between two ends of its requests while others waited, measured last; 0.0: not known."""
    num_free: int = 0
    """So many more ran then than now: they would not wait."""
    tenants: tuple[TenantQueue, ...] = ()
    """Whose they are. Those with the fewest may be left out."""


@dataclass(frozen=True, slots=True)
class QueueReport:
    """The lanes in which somebody waits or lately did, sent to every gateway some times a second.

    A hint: the scheduler itself refuses whom it must, and a gateway that hears nothing refuses nobody by it.
    """

    epoch: int
    lanes: tuple[LaneReport, ...] = ()
    tenants: tuple[TenantQueue, ...] = ()
    """Those that have a bound of their own, with what waits in all lanes."""

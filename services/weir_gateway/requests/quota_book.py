"""What is left of tenants' quotas, by what the scheduler said last of each."""

from collections import OrderedDict
from typing import NamedTuple

from weir.bus.queue_report import QuotaLevel
from weir.core.clock import Clock

_MAX_TENANTS = 1024
"""Those that asked last. Whoever is forgotten is known again with its next request."""


class Allowance(NamedTuple):
    """Of requests, or of tokens, a minute."""

    per_min: float
    left: float
    """From 0 to `per_min`."""
    full_in_s: float
    """Until all of `per_min` is there again, if nothing more is asked."""


class Quota(NamedTuple):
    """None: no such bound."""

    requests: Allowance | None
    tokens: Allowance | None


class QuotaBook:
    """The scheduler's word, with what has come back since: both are of the moment when the last request of the tenant
    at this gateway was granted or refused, so that what it asks for at other gateways shows with the next one."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._noted: OrderedDict[str, tuple[QuotaLevel, float]] = OrderedDict()

    def note(self, tenant: str, level: QuotaLevel | None) -> None:
        """None: it has no quota, or none any more."""
        self._noted.pop(tenant, None)
        if level is None:
            return
        self._noted[tenant] = (level, self._clock.now_s())
        if len(self._noted) > _MAX_TENANTS:
            self._noted.popitem(last=False)

    def try_quota(self, tenant: str) -> Quota | None:
        """As of now. None: there is none, or nothing was heard of it yet."""
        noted = self._noted.get(tenant)
        if noted is None:
            return None
        level, at_s = noted
        age_s = self._clock.now_s() - at_s
        return Quota(
            _try_allowance(level.requests_per_min, level.requests_left, age_s),
            _try_allowance(level.tokens_per_min, level.tokens_left, age_s),
        )


def _try_allowance(per_min: float, left: float, age_s: float) -> Allowance | None:
    if per_min <= 0:
        return None
    left = min(left + age_s * per_min / 60, per_min)
    return Allowance(per_min, max(0.0, left), (per_min - left) * 60 / per_min)

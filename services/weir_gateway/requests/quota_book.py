"""What is left of tenants' quotas, by what the scheduler said last of each."""

from collections import OrderedDict
from typing import NamedTuple

from weir.bus.queue_report import QuotaLevel
from weir.core.bucket import Bucket
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
        self._accounts: OrderedDict[str, Bucket] = OrderedDict()
        """Of tenants that have had calls which no scheduler hears of, what is left of their requests here."""

    def note(self, tenant: str, level: QuotaLevel | None) -> None:
        """None: it has no quota, or none any more."""
        self._noted.pop(tenant, None)
        if level is None:
            return
        self._noted[tenant] = (level, self._clock.now_s())
        if len(self._noted) > _MAX_TENANTS:
            self._noted.popitem(last=False)

    def call_wait_s(self, tenant: str, per_min: float) -> float:
        """How long until the tenant may have one more call that no scheduler hears of, as one of its `per_min` requests
        a minute; 0.0: now. By the account of what it asked for here, and by the scheduler's word where that says less.
        """
        if per_min <= 0:
            return 0.0
        known = self._try_requests(tenant)
        lacking = 0.0 if known is None else min(1.0, known.per_min) - known.left
        return max(self._account(tenant, per_min).wait_s(1, self._clock.now_s()), lacking * 60 / per_min, 0.0)

    def pay_call(self, tenant: str, per_min: float) -> None:
        """It has such a call now."""
        if per_min > 0:
            self._account(tenant, per_min).take(1, self._clock.now_s())

    def give_call_back(self, tenant: str, per_min: float) -> None:
        """One that was paid for, and has not begun."""
        if per_min > 0:
            self._account(tenant, per_min).take(-1, self._clock.now_s())

    def pay_request(self, tenant: str) -> None:
        """The scheduler has accepted a request of it, and taken it from its own account."""
        if tenant in self._accounts:
            self._accounts[tenant].take(1, self._clock.now_s())

    def _account(self, tenant: str, per_min: float) -> Bucket:
        """Begins with what the scheduler said is left."""
        now_s = self._clock.now_s()
        bucket = self._accounts.pop(tenant, None)
        if bucket is None:
            bucket, known = Bucket(per_min, now_s), self._try_requests(tenant)
            bucket.take(0.0 if known is None else known.per_min - known.left, now_s)
        bucket.set_rate(per_min, now_s)
        self._accounts[tenant] = bucket
        if len(self._accounts) > _MAX_TENANTS:
            self._accounts.popitem(last=False)
        return bucket

    def _try_requests(self, tenant: str) -> Allowance | None:
        quota = self.try_quota(tenant)
        return None if quota is None else quota.requests

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

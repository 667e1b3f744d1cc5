"""What each tenant has queued and in flight, and what is left in its token buckets."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from weir.bus.messages import Submit
from weir.bus.queue_report import QuotaLevel
from weir.core.bucket import Bucket
from weir.scheduling.limits import CoreLimits, TenantLimits
from weir.scheduling.request import ScheduledRequest


@dataclass(slots=True)
class _Account:
    limits: TenantLimits
    num_queued: int = 0
    num_in_flight: int = 0
    num_served_tokens: float = 0.0
    """By their price; of this scheduler's time."""
    requests: Bucket | None = None
    tokens: Bucket | None = None


class QuotaDebt(NamedTuple):
    """Seconds until a tenant's buckets are full again; 0.0: they are, or it has none."""

    requests_s: float
    tokens_s: float


@dataclass(frozen=True, slots=True)
class OverQuota:
    """Which bound, in a sentence, and seconds until there is room; None: not known."""

    message: str
    wait_s: float | None
    bound: str
    """By its key in the limits file."""


class Tenants:
    """One account a configured tenant that was ever heard of, so their number is bounded as the configuration is."""

    def __init__(self, limits: CoreLimits) -> None:
        self._limits = limits
        self._accounts: dict[str, _Account] = {}

    def try_over_quota(self, tenant: str, submit: Submit, now_s: float) -> OverQuota | None:
        """Why the request must not be queued now; None: it may."""
        account = self._account(tenant, now_s)
        limits = account.limits
        if limits.max_queued and account.num_queued >= limits.max_queued:
            return OverQuota(f"tenant {tenant}: {limits.max_queued} requests wait, its max_queued", None, "max_queued")
        if account.requests is None and account.tokens is None:
            return None
        waits = []
        if account.requests is not None and (wait_s := account.requests.wait_s(1, now_s)) > 0:
            waits.append((wait_s, f"{limits.requests_per_min:g} requests a minute", "requests_per_min"))
        if account.tokens is not None and (wait_s := account.tokens.wait_s(_num_tokens(submit), now_s)) > 0:
            waits.append((wait_s, f"{limits.tokens_per_min:g} tokens a minute", "tokens_per_min"))
        if not waits:
            return None
        wait_s, what, bound = max(waits)
        return OverQuota(f"tenant {tenant}: over {what}, its {bound}", wait_s, bound)

    def try_quota(self, tenant: str, now_s: float) -> QuotaLevel | None:
        """What is left; None: it has no quota."""
        account = self._account(tenant, now_s)
        if account.requests is None and account.tokens is None:
            return None
        return QuotaLevel(
            account.limits.requests_per_min,
            _level(account.requests, now_s),
            account.limits.tokens_per_min,
            _level(account.tokens, now_s),
        )

    def pay(self, tenant: str, submit: Submit, now_s: float) -> None:
        """The request is accepted: its prompt and the most that it may answer are taken from the buckets."""
        account = self._account(tenant, now_s)
        if account.requests is not None:
            account.requests.take(1, now_s)
        if account.tokens is not None:
            account.tokens.take(_num_tokens(submit), now_s)

    def give_back(self, request: ScheduledRequest, now_s: float) -> float:
        """It ended: tokens that it did not come to are given back. Returns how many found room in the bucket."""
        account = self._account(request.tenant, now_s)
        if account.tokens is None:
            return 0.0
        num_unused = request.submit.max_tokens - request.num_output_tokens
        if request.placement is None:
            num_unused = _num_tokens(request.submit)
        before = account.tokens.level(now_s)
        account.tokens.take(-max(0, num_unused), now_s)
        return account.tokens.level(now_s) - before

    def take_again(self, tenant: str, num_tokens: float, now_s: float) -> None:
        """The request is there after all, for which so many were given back."""
        account = self._account(tenant, now_s)
        if account.tokens is not None:
            account.tokens.take(num_tokens, now_s)

    def count_queued(self, tenant: str, change: int, now_s: float) -> None:
        self._account(tenant, now_s).num_queued += change

    def count_in_flight(self, tenant: str, change: int, now_s: float) -> None:
        self._account(tenant, now_s).num_in_flight += change

    def count_service(self, tenant: str, service: float, now_s: float) -> None:
        self._account(tenant, now_s).num_served_tokens += service

    def is_over_in_flight(self, tenant: str) -> bool:
        """Whether it must have no more in flight."""
        account = self._accounts.get(tenant)
        return account is not None and 0 < account.limits.max_in_flight <= account.num_in_flight

    def metrics(self, now_s: float) -> dict[str, dict[str, float]]:
        """tenant -> metric -> value."""
        return {name: _metrics(account, now_s) for name, account in sorted(self._accounts.items())}

    def counts(self) -> dict[str, tuple[int, int]]:
        """tenant -> (queued, in flight), of those that have any."""
        pairs = {name: (account.num_queued, account.num_in_flight) for name, account in self._accounts.items()}
        return {name: pair for name, pair in pairs.items() if pair != (0, 0)}

    def debts(self, now_s: float) -> dict[str, QuotaDebt]:
        """Of tenants whose buckets are not full."""
        debts = {
            name: QuotaDebt(_full_in_s(account.requests, now_s), _full_in_s(account.tokens, now_s))
            for name, account in self._accounts.items()
        }
        return {name: debt for name, debt in debts.items() if any(debt)}

    def restore_debts(self, debts: Mapping[str, QuotaDebt], now_s: float) -> None:
        """Of tenants that there are."""
        for name in self._limits.tenants_by_name.keys() & debts.keys():
            account, debt = self._account(name, now_s), debts[name]
            if account.requests is not None:
                account.requests.empty_until_full_in(debt.requests_s, now_s)
            if account.tokens is not None:
                account.tokens.empty_until_full_in(debt.tokens_s, now_s)

    def _account(self, tenant: str, now_s: float) -> _Account:
        account = self._accounts.get(tenant)
        return account if account is not None else self._open(tenant, now_s)

    def _open(self, tenant: str, now_s: float) -> _Account:
        limits = self._limits.tenant(tenant)
        account = self._accounts[tenant] = _Account(limits)
        account.requests = Bucket(limits.requests_per_min, now_s) if limits.requests_per_min else None
        account.tokens = Bucket(limits.tokens_per_min, now_s) if limits.tokens_per_min else None
        return account

    def carry_over(self, earlier: "Tenants", now_s: float) -> None:
        """Under new limits, what tenants had used up before stays used up. Counts start anew."""
        for name, old in earlier._accounts.items():
            if name not in self._limits.tenants_by_name:
                continue
            account = self._account(name, now_s)
            account.num_served_tokens = old.num_served_tokens
            account.requests = _carried(old.requests, account.requests, account.limits.requests_per_min, now_s)
            account.tokens = _carried(old.tokens, account.tokens, account.limits.tokens_per_min, now_s)


def _level(bucket: Bucket | None, now_s: float) -> float:
    return 0.0 if bucket is None else bucket.level(now_s)


def _full_in_s(bucket: Bucket | None, now_s: float) -> float:
    return 0.0 if bucket is None else bucket.full_in_s(now_s)


def _carried(old: Bucket | None, new: Bucket | None, per_min: float, now_s: float) -> Bucket | None:
    if old is None or new is None:
        return new
    old.set_rate(per_min, now_s)
    return old


def _num_tokens(submit: Submit) -> int:
    return submit.num_prompt_tokens + submit.max_tokens


def _metrics(account: _Account, now_s: float) -> dict[str, float]:
    metrics = {
        "queued": float(account.num_queued),
        "in_flight": float(account.num_in_flight),
        "served_tokens_total": account.num_served_tokens,
        "weight": account.limits.weight,
    }
    if account.requests is not None:
        metrics["requests_left"] = account.requests.level(now_s)
    if account.tokens is not None:
        metrics["tokens_left"] = account.tokens.level(now_s)
    return metrics

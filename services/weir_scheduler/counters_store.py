"""Tenants' counters and quotas outlive a scheduler: they are put into a durable bucket, an entry for each model and
lane and one for all quotas, and the next leader begins with them."""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from weir.bus.codec import MalformedMessage, decode, encode
from weir.bus.protocol import Bus, BusError, KeyConflict, KvBucket, KvEntry
from weir.bus.subjects import Subjects
from weir.scheduling.core import SchedulerCore
from weir.scheduling.fairness import GroupKey
from weir.scheduling.tenants import QuotaDebt

logger = logging.getLogger(__name__)

_SAVE_S = 1.0
_QUOTAS_KEY = "quotas"


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
    epoch: int = 0
    """Of the leader that counted."""


@dataclass(frozen=True, slots=True)
class TenantDebt:
    """Seconds from `saved_at_s` until the tenant's buckets are full again."""

    tenant: str
    requests_s: float
    tokens_s: float


@dataclass(frozen=True, slots=True)
class QuotaDebts:
    """Of tenants whose buckets are not full; `saved_at_s` is Unix time."""

    saved_at_s: float
    debts: tuple[TenantDebt, ...]
    epoch: int = 0


class CountersStore:
    """Puts what has changed once a second. What the last second lacks, a new leader's tenants are served once more.

    What a later leader has written stays, whatever comes late of an earlier one.
    """

    def __init__(
        self, bus: Bus, subjects: Subjects, core: SchedulerCore, *, unix_time_s: Callable[[], float] = time.time
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._core = core
        self._unix_time_s = unix_time_s
        self._saved: dict[GroupKey, bytes] = {}
        self._saved_full_at_s: dict[str, QuotaDebt] = {}
        """Unix time at which each tenant's buckets are full: the same for as long as nothing is taken."""
        self._revisions: dict[str, int] = {}
        """Of each key as this process knows it."""
        self._kept_bucket: KvBucket | None = None
        self._is_replaced = False
        self._num_failures = 0
        self._num_malformed = 0

    async def restore(self) -> None:
        """Before the first request is heard. Raises BusError."""
        bucket = await self._bucket()
        counters: dict[GroupKey, dict[str, float]] = {}
        for entry in await bucket.list_entries():
            self._revisions[entry.key] = entry.revision
            try:
                if entry.key == _QUOTAS_KEY:
                    self._restore_quotas(entry)
                    continue
                saved = decode(LaneCounters, entry.value or b"")
            except MalformedMessage as error:
                logger.warning("counters under the key %s: %s", entry.key, error)
                self._num_malformed += 1
                continue
            counters[saved.model, saved.lane] = {one.tenant: one.value for one in saved.counters}
        self._core.restore_tenant_counters(counters)

    async def keep(self) -> None:
        """Saves for ever."""
        while True:
            await asyncio.sleep(_SAVE_S)
            await self.save()

    async def save(self) -> None:
        """What cannot be saved now is saved the next time; nothing, once another scheduler leads."""
        if self._is_replaced:
            return
        try:
            bucket = await self._bucket()
            for key, values in self._core.tenant_counters().items():
                model, lane = key
                counters = tuple(TenantCounter(tenant, value) for tenant, value in sorted(values.items()))
                payload = encode(LaneCounters(model, lane, counters, self._core.epoch))
                if self._saved.get(key) != payload:
                    await self._put(bucket, _bucket_key(key), payload)
                    self._saved[key] = payload
            await self._save_quotas(bucket)
        except BusError as error:
            logger.debug("saving tenants' counters: %s", error)
            self._num_failures += 1

    def metrics(self) -> dict[str, float]:
        return {
            "counters_save_failures_total": float(self._num_failures),
            "counters_malformed_total": float(self._num_malformed),
        }

    def _restore_quotas(self, entry: KvEntry) -> None:
        """Raises MalformedMessage. Whatever the clocks of two hosts say, nobody owes more than it did."""
        saved = decode(QuotaDebts, entry.value or b"")
        passed_s = max(0.0, self._unix_time_s() - saved.saved_at_s)
        self._core.restore_quota_debts(
            {
                debt.tenant: QuotaDebt(max(0.0, debt.requests_s - passed_s), max(0.0, debt.tokens_s - passed_s))
                for debt in saved.debts
            }
        )

    async def _save_quotas(self, bucket: KvBucket) -> None:
        """Raises BusError."""
        debts, now_s = self._core.quota_debts(), self._unix_time_s()
        full_at_s = {
            tenant: QuotaDebt(*(round(now_s + left_s, 1) if left_s else 0.0 for left_s in debt))
            for tenant, debt in debts.items()
        }
        if full_at_s == self._saved_full_at_s:
            return
        saved = tuple(TenantDebt(tenant, *debt) for tenant, debt in sorted(debts.items()))
        await self._put(bucket, _QUOTAS_KEY, encode(QuotaDebts(now_s, saved, self._core.epoch)))
        self._saved_full_at_s = full_at_s

    async def _put(self, bucket: KvBucket, key: str, payload: bytes) -> None:
        """Raises BusError, a KeyConflict for what a later leader has written; then nothing more is saved."""
        try:
            self._revisions[key] = await bucket.update(key, payload, revision=self._revisions.get(key, 0))
        except KeyConflict:
            entry = await bucket.get(key)
            if _epoch_of(key, entry) > self._core.epoch:
                self._is_replaced = True
                logger.warning("tenants' counters are not saved any more: another scheduler leads")
                raise
            # Its own write whose answer was lost, or a late one of an earlier leader.
            self._revisions[key] = await bucket.update(key, payload, revision=entry.revision if entry else 0)

    async def _bucket(self) -> KvBucket:
        """Asked for once, which costs a server more than a write: one that has lost it makes it anew at the next."""
        if self._kept_bucket is None:
            self._kept_bucket = await self._bus.bucket(self._subjects.counters_bucket, durable=True)
        return self._kept_bucket


def _epoch_of(key: str, entry: KvEntry | None) -> int:
    """0: there is none, or none that can be read."""
    message_type: type[QuotaDebts] | type[LaneCounters] = QuotaDebts if key == _QUOTAS_KEY else LaneCounters
    try:
        return decode(message_type, entry.value or b"").epoch if entry is not None else 0
    except MalformedMessage:
        return 0


def _bucket_key(key: GroupKey) -> str:
    """Models may be called what no key may."""
    return hashlib.sha256("\0".join(key).encode()).hexdigest()[:32]

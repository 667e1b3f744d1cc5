"""Tenants' counters outlive a scheduler: they are put into a durable bucket, and the next leader begins with them."""

import asyncio
import hashlib
import logging

from weir.bus.codec import MalformedMessage, decode, encode
from weir.bus.counter_messages import LaneCounters, TenantCounter
from weir.bus.protocol import Bus, BusError, KvBucket
from weir.bus.subjects import Subjects
from weir.scheduling.core import SchedulerCore
from weir.scheduling.fairness import GroupKey

logger = logging.getLogger(__name__)

_SAVE_S = 1.0


class CountersStore:
    """Puts what has changed once a second. What the last second lacks, a new leader's tenants are served once more."""

    def __init__(self, bus: Bus, subjects: Subjects, core: SchedulerCore) -> None:
        self._bus = bus
        self._subjects = subjects
        self._core = core
        self._saved: dict[GroupKey, bytes] = {}
        self._num_failures = 0
        self._num_malformed = 0

    async def restore(self) -> None:
        """Before the first request is heard. Raises BusError."""
        bucket = await self._bucket()
        counters: dict[GroupKey, dict[str, float]] = {}
        for entry in await bucket.list_entries():
            try:
                told = decode(LaneCounters, entry.value or b"")
            except MalformedMessage as error:
                logger.warning("counters under the key %s: %s", entry.key, error)
                self._num_malformed += 1
                continue
            counters[told.model, told.lane] = {one.tenant: one.value for one in told.counters}
        self._core.restore_tenant_counters(counters)

    async def keep(self) -> None:
        """Saves for ever."""
        while True:
            await asyncio.sleep(_SAVE_S)
            await self.save()

    async def save(self) -> None:
        """What cannot be saved now is saved the next time."""
        try:
            bucket = await self._bucket()
            for key, values in self._core.tenant_counters().items():
                model, lane = key
                counters = tuple(TenantCounter(tenant, value) for tenant, value in sorted(values.items()))
                payload = encode(LaneCounters(model, lane, counters))
                if self._saved.get(key) != payload:
                    await bucket.put(_bucket_key(key), payload)
                    self._saved[key] = payload
        except BusError as error:
            logger.debug("saving tenants' counters: %s", error)
            self._num_failures += 1

    def metrics(self) -> dict[str, float]:
        return {
            "counters_save_failures_total": float(self._num_failures),
            "counters_malformed_total": float(self._num_malformed),
        }

    async def _bucket(self) -> KvBucket:
        return await self._bus.bucket(self._subjects.counters_bucket, durable=True)


def _bucket_key(key: GroupKey) -> str:
    """Models may be called what no key may."""
    return hashlib.sha256("\0".join(key).encode()).hexdigest()[:32]

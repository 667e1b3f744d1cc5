"""Tenants' counters and quotas outlive the scheduler that counted."""

import pytest
from tests.unit.scheduler.rig import make_submit
from tests.unit.scheduler.scripted import SUBJECTS, Stack, eventually

from weir.bus.codec import decode, encode
from weir.bus.in_memory import InMemoryBus, InMemoryHub
from weir.bus.in_memory_kv import InMemoryBucket
from weir.core.clock import ManualClock
from weir.scheduling.core import SchedulerCore
from weir.scheduling.limits import CoreLimits, TenantLimits
from weir.scheduling.tenants import QuotaDebt
from weir_scheduler.counters_store import CountersStore, LaneCounters, TenantCounter

LIMITS = CoreLimits(tenants=(TenantLimits("a"), TenantLimits("b")))


def make_core() -> SchedulerCore:
    return SchedulerCore(LIMITS, ManualClock(), 1)


async def test_what_was_counted_is_saved_once_and_restored_where_lanes_and_tenants_are_still_known() -> None:
    bus = InMemoryHub().connect()
    bucket = await bus.bucket(SUBJECTS.counters_bucket, durable=True)
    before, counted = make_core(), {"a": 10.0, "b": 7.5, "default": 1.0}
    before.restore_tenant_counters({("some model/1", "batch"): counted})
    store = CountersStore(bus, SUBJECTS, before)
    await store.save()
    revisions = [entry.revision for entry in await bucket.list_entries()]
    await store.save()
    assert [entry.revision for entry in await bucket.list_entries()] == revisions, "nothing has changed"
    gone = LaneCounters("some model/1", "gone", (TenantCounter("a", 3.0),))
    strange = LaneCounters("m", "batch", (TenantCounter("nobody", 3.0), TenantCounter("a", -3.0)))
    await bucket.put("gone", encode(gone))
    await bucket.put("strange", encode(strange))
    await bucket.put("broken", b"\xff")
    after = make_core()
    restored = CountersStore(bus, SUBJECTS, after)
    await restored.restore()
    assert after.tenant_counters() == {("some model/1", "batch"): counted}
    assert restored.metrics()["counters_malformed_total"] == 1
    await bus.close()


async def test_a_bus_that_is_away_costs_nothing_but_the_save() -> None:
    hub = InMemoryHub()
    bus = hub.connect()
    core = make_core()
    core.restore_tenant_counters({("m", "batch"): {"a": 1.0}})
    store = CountersStore(bus, SUBJECTS, core)
    bus.cut_off()
    await store.save()
    assert store.metrics()["counters_save_failures_total"] == 1
    bus.reconnect()
    await store.save()
    bucket = await bus.bucket(SUBJECTS.counters_bucket, durable=True)
    assert len(await bucket.list_entries()) == 1
    await bus.close()


def counting_core(epoch: int, value: float) -> SchedulerCore:
    core = SchedulerCore(LIMITS, ManualClock(), epoch)
    core.restore_tenant_counters({("m", "batch"): {"a": value}})
    return core


async def test_a_leader_that_was_replaced_overwrites_nothing_and_its_late_writes_are_overwritten() -> None:
    bus = InMemoryHub().connect()
    old = CountersStore(bus, SUBJECTS, counting_core(1, 1.0))
    await old.save()
    new = CountersStore(bus, SUBJECTS, counting_core(2, 5.0))
    await new.restore()
    old._saved.clear()
    await old.save()  # late: the new one has read, and not written yet
    new._core.restore_tenant_counters({("m", "batch"): {"a": 5.0}})
    await new.save()
    old._saved.clear()
    await old.save()
    await old.save()

    bucket = await bus.bucket(SUBJECTS.counters_bucket, durable=True)
    (entry,) = await bucket.list_entries()
    assert decode(LaneCounters, entry.value or b"") == LaneCounters("m", "batch", (TenantCounter("a", 5.0),), 2)
    assert old.metrics()["counters_save_failures_total"] == 1
    await bus.close()


@pytest.mark.timeout(60)
async def test_the_next_leader_knows_what_tenants_were_served() -> None:
    stack = Stack()
    try:
        first = await stack.add_scheduler("s1")
        gateway = await stack.add_gateway()
        assert (await gateway.submit("r")).queued
        await eventually(lambda: bool(gateway.grants))
        await gateway.finish("r")
        await eventually(lambda: first.describe().metrics["granted"] == 0)
        await first.stop()
        second = await stack.add_scheduler("s2")
        assert second.describe().metrics["tenant_counters"] == 1
    finally:
        await stack.close()


QUOTAS = CoreLimits(tenants=(TenantLimits("a", requests_per_min=2), TenantLimits("b", tokens_per_min=600)))


class _Restarts:
    """One scheduler after another over one bucket; a restart takes `after_s`, by the wall clock."""

    def __init__(self, hub: InMemoryHub) -> None:
        self.bus = hub.connect()
        self.unix_s = 1_000_000.0
        self.clock = ManualClock()
        self.core = SchedulerCore(QUOTAS, self.clock, 1)
        self.store = CountersStore(self.bus, SUBJECTS, self.core, unix_time_s=lambda: self.unix_s)

    def run(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.unix_s += seconds

    async def restart(self, after_s: float, limits: CoreLimits = QUOTAS) -> None:
        await self.store.save()
        self.unix_s += after_s
        self.core = SchedulerCore(limits, self.clock, 2)
        self.store = CountersStore(self.bus, SUBJECTS, self.core, unix_time_s=lambda: self.unix_s)
        await self.store.restore()

    def left(self) -> tuple[float, float]:
        metrics = self.core.tenant_metrics()
        return metrics["a"]["requests_left"], metrics["b"]["tokens_left"]


@pytest.mark.parametrize(
    ("after_s", "left"),
    [(0, (0.5, 400.0)), (15, (1.0, 550.0)), (3600, (2.0, 600.0)), (-3600, (0.5, 400.0))],
)
async def test_quotas_are_as_used_up_after_a_restart_as_they_would_be_without_one(
    after_s: float, left: tuple[float, float]
) -> None:
    """A clock that went back gives no credit and takes none."""
    restarts = _Restarts(InMemoryHub())
    restarts.core.restore_quota_debts({"a": QuotaDebt(60.0, 0.0), "b": QuotaDebt(0.0, 35.0)})
    restarts.run(15)
    await restarts.restart(after_s)
    for name in ("a", "b"):
        restarts.core.submit(make_submit("r", "no-such-lane", tenant=name))
    assert restarts.left() == pytest.approx(left)
    await restarts.bus.close()


async def test_quotas_of_tenants_that_are_gone_or_have_none_now_are_left_out() -> None:
    restarts = _Restarts(InMemoryHub())
    restarts.core.restore_quota_debts({"a": QuotaDebt(60.0, 0.0), "b": QuotaDebt(0.0, 35.0)})
    await restarts.restart(0, CoreLimits(tenants=(TenantLimits("b"),)))
    assert restarts.core.quota_debts() == {}
    await restarts.bus.close()


async def test_quotas_are_saved_when_something_was_taken_and_not_while_they_fill() -> None:
    restarts = _Restarts(InMemoryHub())
    bucket = await restarts.bus.bucket(SUBJECTS.counters_bucket, durable=True)

    async def revision() -> int:
        await restarts.store.save()
        entry = await bucket.get("quotas")
        return 0 if entry is None else entry.revision

    assert await revision() == 0, "all are full"
    restarts.core.restore_quota_debts({"b": QuotaDebt(0.0, 35.0)})
    first = await revision()
    assert first > 0
    restarts.run(7.3)
    assert await revision() == first
    restarts.core.restore_quota_debts({"a": QuotaDebt(3.0, 0.0)})
    second = await revision()
    assert second > first
    restarts.run(60)
    assert await revision() > second, "all are full again"
    await restarts.restart(0)
    assert restarts.core.quota_debts() == {}
    await restarts.bus.close()


async def test_the_bucket_is_asked_for_once_however_often_counters_are_saved() -> None:
    bus, asked = _CountingBus(InMemoryHub()), SUBJECTS.counters_bucket
    core = make_core()
    store = CountersStore(bus, SUBJECTS, core)
    await store.restore()
    for value in (1.0, 2.0, 3.0):
        core.restore_tenant_counters({("m", "batch"): {"a": value}})
        await store.save()
    assert bus.buckets == [asked]
    await bus.close()


class _CountingBus(InMemoryBus):
    def __init__(self, hub: InMemoryHub) -> None:
        super().__init__(hub)
        self.buckets: list[str] = []

    async def bucket(
        self,
        name: str,
        *,
        ttl_s: float | None = None,
        durable: bool = False,
        max_bytes: int | None = None,
        max_entries: int | None = None,
    ) -> InMemoryBucket:
        self.buckets.append(name)
        bounds = {"max_bytes": max_bytes, "max_entries": max_entries}
        return await super().bucket(name, ttl_s=ttl_s, durable=durable, **bounds)

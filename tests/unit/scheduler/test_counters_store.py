"""Tenants' counters outlive the scheduler that counted."""

import pytest
from tests.unit.scheduler.scripted import SUBJECTS, Stack, eventually

from weir.bus.codec import encode
from weir.bus.counter_messages import LaneCounters, TenantCounter
from weir.bus.memory import MemoryHub
from weir.core.clock import ManualClock
from weir.scheduling.core import SchedulerCore
from weir.scheduling.limits import CoreLimits, TenantLimits
from weir_scheduler.counters_store import CountersStore

LIMITS = CoreLimits(tenants=(TenantLimits("a"), TenantLimits("b")))


def make_core() -> SchedulerCore:
    return SchedulerCore(LIMITS, ManualClock(), 1)


async def test_what_was_counted_is_saved_once_and_restored_where_lanes_and_tenants_are_still_known() -> None:
    bus = MemoryHub().connect()
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
    hub = MemoryHub()
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

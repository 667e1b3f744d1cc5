"""A worker has one connection to the bus, for its registry entry and for the policy: the shell opens and closes it."""

import asyncio

import pytest
from tests.unit.worker.rig import INSTANCE, Rig, eventually, running_rig

from weir.bus.codec import decode, encode
from weir.bus.configuration import POLICY_KEY, PolicyChoice
from weir.bus.in_memory import InMemoryBus, InMemoryHub
from weir.bus.messages import WorkerRecord
from weir.bus.protocol import BusUnavailable
from weir.bus.subjects import WORKER_TTL_S, Subjects
from weir.core.errors import Unavailable

SUBJECTS = Subjects(INSTANCE)


async def choose(hub: InMemoryHub, policy: str) -> None:
    bucket = await hub.connect().bucket(SUBJECTS.configuration_bucket, durable=True)
    await bucket.put(POLICY_KEY, encode(PolicyChoice(1, policy)))


async def registered(hub: InMemoryHub) -> set[str]:
    bucket = await hub.connect().bucket(SUBJECTS.workers_bucket, ttl_s=WORKER_TTL_S)
    entries = await bucket.list_entries()
    return {decode(WorkerRecord, entry.value).worker_id for entry in entries if entry.value is not None}


def policies(rig: Rig) -> set[str]:
    return {worker.shell.policy for worker in rig.workers}


async def test_registry_and_policy_share_a_connection_that_ends_with_the_worker() -> None:
    async with running_rig() as rig:
        await choose(rig.hub, "edf")
        await eventually(lambda: policies(rig) == {"edf"})
        assert await registered(rig.hub) == {worker.worker_id for worker in rig.workers}
        buses = [bus for worker in rig.workers for bus in worker.buses]
        assert len(buses) == len(rig.workers)
        assert not any(bus.is_closed for bus in buses)
    assert all(bus.is_closed for bus in buses)


async def test_after_an_outage_both_go_on_over_the_same_connection(rig: Rig) -> None:
    await choose(rig.hub, "edf")
    await eventually(lambda: policies(rig) == {"edf"})
    rig.hub.stop()
    await eventually(lambda: all(worker.metrics()["registry_failures_total"] for worker in rig.workers))
    rig.hub.start()
    assert await registered(rig.hub) == set(), "the server came back without what was not durable"
    await choose(rig.hub, "fcfs")
    await eventually(lambda: policies(rig) == {"fcfs"})
    async with asyncio.timeout(5):
        while len(await registered(rig.hub)) < len(rig.workers):  # noqa: ASYNC110 - a bucket has no event
            await asyncio.sleep(0.02)
    assert [len(worker.buses) for worker in rig.workers] == [1, 1]


async def test_a_bus_that_does_not_close_holds_no_worker_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a client does whose server has gone."""

    async def close(bus: InMemoryBus) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("weir.worker.shell._BUS_CLOSE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(InMemoryBus, "close", close)
    async with running_rig() as rig:
        pass
    assert rig.arena.num_free_pages == rig.arena.segment.geometry.num_pages


async def test_without_a_bus_a_worker_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(hub: InMemoryHub) -> InMemoryBus:
        raise BusUnavailable("no NATS server answers")

    monkeypatch.setattr(InMemoryHub, "connect", connect)
    with pytest.raises(Unavailable, match="no NATS server answers"):
        async with running_rig():
            pass

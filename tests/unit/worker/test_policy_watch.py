"""Workers take the policy that the scheduler chose, once a change, from whoever is the latest scheduler."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from tests.unit.worker.rig import INSTANCE, Rig, eventually

from weir.bus.codec import encode
from weir.bus.configuration import POLICY_KEY, PolicyChoice
from weir.bus.in_memory import InMemoryHub
from weir.bus.subjects import Subjects
from weir.engine.loop import InboxFull
from weir.policy.seams import Policy
from weir.worker.engine.policy_watch import PolicyWatch

SUBJECTS = Subjects("watch")


async def test_the_engine_of_a_worker_goes_by_the_choice(rig: Rig) -> None:
    await write_choice(rig.hub, PolicyChoice(1, "edf"), Subjects(INSTANCE))
    await eventually(lambda: {rig.prefill.shell.policy, rig.decode.shell.policy} == {"edf"})


async def write_choice(hub: InMemoryHub, choice: PolicyChoice | bytes, subjects: Subjects = SUBJECTS) -> None:
    bus = hub.connect()
    bucket = await bus.bucket(subjects.configuration_bucket, durable=True)
    await bucket.put(POLICY_KEY, choice if isinstance(choice, bytes) else encode(choice))
    await bus.close()


@asynccontextmanager
async def watching(hub: InMemoryHub, take: Callable[[Policy], None]) -> AsyncIterator[PolicyWatch]:
    watch = PolicyWatch(SUBJECTS, take)
    watch.start(hub.connect())
    yield watch
    await watch.stop()


async def test_the_present_choice_and_each_later_one_are_taken() -> None:
    hub, taken = InMemoryHub(), list[Policy]()
    await write_choice(hub, PolicyChoice(1, "fcfs"))
    async with watching(hub, taken.append) as watch:
        await eventually(lambda: [policy.name for policy in taken] == ["fcfs"])
        await write_choice(hub, PolicyChoice(1, "slai:default_itl_s=0.1"))
        await eventually(lambda: [policy.name for policy in taken] == ["fcfs", "slai"])
        assert watch.policy_name == "slai"
    hub.stop()


async def test_a_choice_that_comes_again_is_taken_once() -> None:
    hub, taken = InMemoryHub(), list[Policy]()
    async with watching(hub, taken.append) as watch:
        await write_choice(hub, PolicyChoice(1, "edf"))
        await eventually(lambda: watch.policy_name == "edf")
        await write_choice(hub, PolicyChoice(2, "edf"))
        await asyncio.sleep(0.05)
        await write_choice(hub, PolicyChoice(2, "fcfs"))
        await eventually(lambda: watch.policy_name == "fcfs")
        assert [policy.name for policy in taken] == ["edf", "fcfs"]
    hub.stop()


async def test_a_scheduler_that_was_replaced_is_not_heard() -> None:
    hub, taken = InMemoryHub(), list[Policy]()
    async with watching(hub, taken.append) as watch:
        await write_choice(hub, PolicyChoice(5, "edf"))
        await eventually(lambda: watch.policy_name == "edf")
        await write_choice(hub, PolicyChoice(4, "fcfs"))
        await write_choice(hub, PolicyChoice(6, "srtf"))
        await eventually(lambda: watch.policy_name == "srtf")
        assert [policy.name for policy in taken] == ["edf", "srtf"]
    hub.stop()


async def test_a_choice_that_cannot_be_taken_is_counted_and_changes_nothing() -> None:
    hub, taken = InMemoryHub(), list[Policy]()
    async with watching(hub, taken.append) as watch:
        await write_choice(hub, PolicyChoice(1, "edf"))
        await eventually(lambda: watch.policy_name == "edf")
        await write_choice(hub, PolicyChoice(1, "no-such-policy"))
        await eventually(lambda: watch.metrics()["policy_choices_refused_total"] == 1)
        await write_choice(hub, b"\xc1")
        await eventually(lambda: watch.metrics()["policy_choices_refused_total"] == 2)
        assert [policy.name for policy in taken] == ["edf"]
    hub.stop()


def takes_after(errors: list[Exception], taken: list[Policy]) -> Callable[[Policy], None]:
    def take(policy: Policy) -> None:
        if errors:
            raise errors.pop()
        taken.append(policy)

    return take


async def test_a_choice_that_the_engine_had_no_room_for_is_taken_later() -> None:
    hub, taken = InMemoryHub(), list[Policy]()
    async with watching(hub, takes_after([InboxFull("full"), InboxFull("full")], taken)) as watch:
        await write_choice(hub, PolicyChoice(1, "edf"))
        await eventually(lambda: [policy.name for policy in taken] == ["edf"])
        assert watch.policy_name == "edf"
    hub.stop()


async def test_it_hears_of_changes_after_the_bus_was_away() -> None:
    hub, taken = InMemoryHub(), list[Policy]()
    async with watching(hub, taken.append) as watch:
        await write_choice(hub, PolicyChoice(1, "edf"))
        await eventually(lambda: watch.policy_name == "edf")
        hub.stop()
        await asyncio.sleep(0.05)
        hub.start()
        await write_choice(hub, PolicyChoice(1, "fcfs"))
        await eventually(lambda: watch.policy_name == "fcfs")
    hub.stop()


async def test_a_worker_that_starts_without_a_bus_hears_later() -> None:
    hub, taken = InMemoryHub(), list[Policy]()
    hub.stop()
    async with watching(hub, taken.append) as watch:
        await asyncio.sleep(0.05)
        hub.start()
        await write_choice(hub, PolicyChoice(1, "edf"))
        await eventually(lambda: watch.policy_name == "edf")
    hub.stop()


async def test_a_defect_is_counted_and_the_choice_is_heard_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.bus.configuration_watch._RETRY_S", 0.01)
    hub, taken = InMemoryHub(), list[Policy]()
    async with watching(hub, takes_after([RuntimeError("a defect")], taken)) as watch:
        await write_choice(hub, PolicyChoice(1, "edf"))
        await eventually(lambda: [policy.name for policy in taken] == ["edf"])
        assert watch.metrics()["policy_watch_failures_total"] == 1
    hub.stop()

"""Whoever watches a key of the configuration gets each value of it, whatever happens to the bus or to the watcher."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from tests.unit.hubs import made_hub

from weir.bus.codec import encode
from weir.bus.configuration import ACCESS_KEY, POLICY_KEY, ConfigurationWatch, PolicyChoice
from weir.bus.in_memory import InMemoryHub
from weir.bus.subjects import Subjects
from weir.core.tasks import end_tasks

SUBJECTS = Subjects("test")
Watch = ConfigurationWatch[PolicyChoice]


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.bus.configuration._RETRY_S", 0.01)


class Full(Exception):
    """There is no room for the value now."""


@asynccontextmanager
async def following(hub: InMemoryHub, on_value: Callable[[PolicyChoice], None]) -> AsyncIterator[Watch]:
    bus = hub.connect()
    watch = ConfigurationWatch(POLICY_KEY, PolicyChoice, on_value, retried=(Full,))
    task = asyncio.create_task(watch.follow(bus, SUBJECTS))
    try:
        yield watch
    finally:
        await end_tasks([task])
        await bus.close()


async def put(hub: InMemoryHub, value: PolicyChoice | bytes, key: str = POLICY_KEY) -> None:
    bus = hub.connect()
    bucket = await bus.bucket(SUBJECTS.configuration_bucket, durable=True)
    await bucket.put(key, value if isinstance(value, bytes) else encode(value))
    await bus.close()


async def eventually(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not is_true():  # noqa: ASYNC110  what is waited for has no event
            await asyncio.sleep(0.005)


def takes_after(errors: list[Exception], taken: list[str]) -> Callable[[PolicyChoice], None]:
    def take(choice: PolicyChoice) -> None:
        if errors:
            raise errors.pop()
        taken.append(choice.policy)

    return take


async def test_the_present_value_and_each_change_are_taken_and_other_keys_are_not() -> None:
    hub, taken = made_hub("test"), list[str]()
    await put(hub, PolicyChoice(1, "fcfs"))
    async with following(hub, takes_after([], taken)) as watch:
        await eventually(lambda: taken == ["fcfs"])
        await put(hub, PolicyChoice(1, "not this one"), ACCESS_KEY)
        await put(hub, PolicyChoice(1, "edf"))
        await eventually(lambda: taken == ["fcfs", "edf"])
        assert (watch.num_malformed, watch.num_failures) == (0, 0)


async def test_a_bus_that_is_away_at_the_start_and_later_costs_no_change() -> None:
    hub, taken = made_hub("test"), list[str]()
    hub.stop()
    async with following(hub, takes_after([], taken)) as watch:
        await asyncio.sleep(0.05)
        hub.start()
        await put(hub, PolicyChoice(1, "fcfs"))
        await eventually(lambda: taken[-1:] == ["fcfs"])
        hub.stop()
        await asyncio.sleep(0.05)
        hub.start()
        await put(hub, PolicyChoice(1, "edf"))
        await eventually(lambda: taken[-1:] == ["edf"])
        assert watch.num_failures == 0


async def test_a_value_that_cannot_be_decoded_is_counted_and_the_next_one_is_taken() -> None:
    hub, taken = made_hub("test"), list[str]()
    async with following(hub, takes_after([], taken)) as watch:
        await put(hub, b"\xc1")
        await eventually(lambda: watch.num_malformed == 1)
        await put(hub, PolicyChoice(1, "edf"))
        await eventually(lambda: taken == ["edf"])


async def test_a_deleted_key_changes_nothing() -> None:
    hub, taken = made_hub("test"), list[str]()
    async with following(hub, takes_after([], taken)) as watch:
        await put(hub, PolicyChoice(1, "edf"))
        await eventually(lambda: taken == ["edf"])
        bus = hub.connect()
        await (await bus.bucket(SUBJECTS.configuration_bucket, durable=True)).delete(POLICY_KEY)
        await asyncio.sleep(0.05)
        await put(hub, PolicyChoice(1, "fcfs"))
        await eventually(lambda: taken == ["edf", "fcfs"])
        assert (watch.num_malformed, watch.num_failures) == (0, 0)
        await bus.close()


async def test_a_value_that_cannot_be_taken_now_comes_again_and_is_no_failure() -> None:
    hub, taken = made_hub("test"), list[str]()
    async with following(hub, takes_after([Full(), Full()], taken)) as watch:
        await put(hub, PolicyChoice(1, "edf"))
        await eventually(lambda: taken == ["edf"])
        assert watch.num_failures == 0


async def test_a_defect_of_the_callback_is_counted_and_the_value_comes_again() -> None:
    hub, taken = made_hub("test"), list[str]()
    async with following(hub, takes_after([RuntimeError("a defect")], taken)) as watch:
        await put(hub, PolicyChoice(1, "edf"))
        await eventually(lambda: taken == ["edf"])
        assert watch.num_failures == 1

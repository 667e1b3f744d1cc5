"""The rules of access are followed whatever happens: a key that was taken away must not open for ever."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from tests.unit.gateway.fake_scheduler import OPEN_RULES

from weir.bus.codec import encode
from weir.bus.configuration import ACCESS_KEY, AccessRules
from weir.bus.in_memory import InMemoryHub
from weir.bus.subjects import Subjects
from weir_gateway.access.access import AccessControl
from weir_gateway.access.access_watch import AccessWatch

SUBJECTS = Subjects("test")


class _FailingBook(AccessControl):
    """Fails at the first rules that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.num_told = 0

    def take(self, rules: AccessRules) -> bool:
        self.num_told += 1
        if self.num_told == 1:
            raise RuntimeError("a defect")
        return super().take(rules)


@contextlib.asynccontextmanager
async def following(hub: InMemoryHub, book: AccessControl) -> AsyncIterator[AccessWatch]:
    watch, bus = AccessWatch(book), hub.connect()
    task = asyncio.create_task(watch.follow(bus, SUBJECTS))
    yield watch
    task.cancel()
    await asyncio.wait([task])
    await bus.close()


async def say(hub: InMemoryHub, rules: AccessRules) -> None:
    bus = hub.connect()
    await (await bus.bucket(SUBJECTS.configuration_bucket, durable=True)).put(ACCESS_KEY, encode(rules))
    await bus.close()


async def test_a_defect_is_counted_and_the_rules_are_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.bus.configuration_watch._RETRY_S", 0.01)
    hub, book = InMemoryHub(), _FailingBook()
    await say(hub, OPEN_RULES)
    async with following(hub, book) as watch:
        assert await watch.wait_known(5)
        assert book.rules == OPEN_RULES
        assert watch.metrics()["access_rules_failures_total"] == 1


async def test_a_bus_that_is_away_at_the_start_and_later_costs_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.bus.configuration_watch._RETRY_S", 0.01)
    hub, book = InMemoryHub(), AccessControl()
    hub.stop()
    async with following(hub, book) as watch:
        assert not await watch.wait_known(0.05)
        hub.start()
        await say(hub, OPEN_RULES)
        assert await watch.wait_known(5)
        hub.stop()
        await asyncio.sleep(0.05)
        hub.start()
        later = replace(OPEN_RULES, default_tenant="other")
        await say(hub, later)
        async with asyncio.timeout(5):
            while book.rules != later:  # noqa: ASYNC110  what is waited for has no event
                await asyncio.sleep(0.01)
        assert watch.metrics()["access_rules_failures_total"] == 0

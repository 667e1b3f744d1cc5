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
from weir_gateway.access.access_control import AccessControl
from weir_gateway.access.access_watch import AccessWatch

SUBJECTS = Subjects("test")


class _FailingOnce(AccessControl):
    """Fails at its first rules."""

    def __init__(self) -> None:
        super().__init__()
        self.num_updates = 0

    def update(self, rules: AccessRules) -> bool:
        self.num_updates += 1
        if self.num_updates == 1:
            raise RuntimeError("a defect")
        return super().update(rules)


@contextlib.asynccontextmanager
async def following(hub: InMemoryHub, access: AccessControl) -> AsyncIterator[AccessWatch]:
    watch, bus = AccessWatch(access), hub.connect()
    task = asyncio.create_task(watch.follow(bus, SUBJECTS))
    yield watch
    task.cancel()
    await asyncio.wait([task])
    await bus.close()


async def write(hub: InMemoryHub, rules: AccessRules) -> None:
    bus = hub.connect()
    await (await bus.bucket(SUBJECTS.configuration_bucket, durable=True)).put(ACCESS_KEY, encode(rules))
    await bus.close()


async def test_a_defect_is_counted_and_the_rules_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.bus.configuration_watch._RETRY_S", 0.01)
    hub, access = InMemoryHub(), _FailingOnce()
    await write(hub, OPEN_RULES)
    async with following(hub, access) as watch:
        assert await watch.wait_known(5)
        assert access.identify(None).tenant == OPEN_RULES.default_tenant
        assert watch.metrics()["access_rules_failures_total"] == 1


async def test_a_bus_that_is_away_at_the_start_and_later_costs_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.bus.configuration_watch._RETRY_S", 0.01)
    hub, access = InMemoryHub(), AccessControl()
    hub.stop()
    async with following(hub, access) as watch:
        assert not await watch.wait_known(0.05)
        hub.start()
        await write(hub, OPEN_RULES)
        assert await watch.wait_known(5)
        hub.stop()
        await asyncio.sleep(0.05)
        hub.start()
        later = replace(OPEN_RULES, default_tenant="other")
        await write(hub, later)
        async with asyncio.timeout(5):
            while access.identify(None).tenant != later.default_tenant:  # noqa: ASYNC110  what is waited for has no event
                await asyncio.sleep(0.01)
        assert watch.metrics()["access_rules_failures_total"] == 0

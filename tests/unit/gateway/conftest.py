"""The gateway that the tests of this folder talk to."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from tests.unit.gateway.world import FAST, World, open_world


@pytest.fixture
def max_dispatches() -> int:
    """Of a request; `failing.ONE_DISPATCH` lets each end with what ends its first one."""
    return FAST.driver.max_dispatches


@pytest.fixture
async def world(max_dispatches: int) -> AsyncIterator[World]:
    async with open_world(replace(FAST, driver=replace(FAST.driver, max_dispatches=max_dispatches))) as world:
        yield world

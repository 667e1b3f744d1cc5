"""The gateway that the tests of this folder talk to."""

from collections.abc import AsyncIterator

import pytest
from tests.unit.gateway.world import World, open_world


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with open_world() as world:
        yield world

"""A prefill and a decode worker around a fake model, and a gateway's streams with both."""

from collections.abc import AsyncIterator

import pytest
from tests.unit.worker.rig import (
    GATEWAY,
    Rig,
    Stream,
    connected,
    running_rig,
)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running_rig(gateway_gone_s=0.3) as made:
        yield made


@pytest.fixture
async def streams(rig: Rig) -> AsyncIterator[tuple[Stream, Stream]]:
    async with connected(rig.prefill, GATEWAY) as prefill, connected(rig.decode, GATEWAY) as decode_:
        yield prefill, decode_

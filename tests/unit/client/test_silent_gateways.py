"""A gateway whose machine has lost its power, or its network, closes no connection: clients notice by themselves."""

import asyncio
import time
from collections.abc import Iterator

import pytest
from tests.chaos.relay import Relay
from tests.unit.client.scripted_gateway import scripted_gateway

from weir.client import AsyncWeirClient, WeirClient
from weir.core.errors import Unavailable

NOTICED_S = 25.0
"""Within it, on any machine; it takes seven seconds, and gRPC alone a minute."""


@pytest.fixture
def relay() -> Iterator[Relay]:
    """To a gateway whose streams do not end."""
    with scripted_gateway() as (gateway, address):
        gateway.never_ends = True
        host, _, port = address.rpartition(":")
        with Relay(host, int(port)) as relay:
            yield relay


def test_a_blocking_stream_of_a_gateway_that_has_gone_silent_is_unavailable(relay: Relay) -> None:
    with WeirClient(relay.address, timeout_s=60) as client:
        chunks = client.generate("x")
        next(chunks)
        relay.cut()
        cut_at_s = time.monotonic()
        with pytest.raises(Unavailable):
            next(chunks)
    assert time.monotonic() - cut_at_s < NOTICED_S


async def test_an_asyncio_stream_of_a_gateway_that_has_gone_silent_is_unavailable(relay: Relay) -> None:
    async with AsyncWeirClient(relay.address, timeout_s=60) as client:
        chunks = client.generate("x")
        await anext(chunks)
        relay.cut()
        async with asyncio.timeout(NOTICED_S):
            with pytest.raises(Unavailable):
                await anext(chunks)

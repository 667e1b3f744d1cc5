"""What clients can make a gateway hold beside running requests is bounded, and comes free again."""

import asyncio

import httpx
import pytest
from tests.unit.gateway.world import FAST, World, open_world

from weir.client import AsyncWeirClient
from weir.core.errors import Overloaded
from weir.rpc.gate import PortLimits
from weir.testing.load import greedy_request, stream

SMALL = PortLimits(max_message_bytes=1000, max_calls=8)


async def test_bodies_that_come_at_the_same_time_are_bounded_together() -> None:
    async with (
        open_world(max_bodies_bytes=1000, port_limits=SMALL) as world,
        httpx.AsyncClient(base_url=world.http_url) as http,
    ):
        address = httpx.URL(world.http_url)
        _, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n" + b" " * 800)
        body = {"prompt": "x" * 300, "max_tokens": 1}

        async def post(wanted: int) -> httpx.Response:
            for _ in range(500):
                response = await http.post("/v1/completions", json=body)
                if response.status_code == wanted:
                    return response
                await asyncio.sleep(0.02)
            pytest.fail(f"never {wanted}")

        refused = await post(429)
        assert "bodies of more than 1000 bytes are being read at once" in refused.json()["error"]["message"]
        assert refused.headers["Retry-After"] == "1"
        writer.close()
        await post(200)


async def test_a_text_that_is_only_tokenized_needs_a_place_as_well(world: World) -> None:
    world.pair.stops_after = 0
    requests = [
        asyncio.create_task(stream(world.stub, greedy_request("x", max_tokens=8)))
        for _ in range(FAST.driver.max_requests)
    ]
    await world.until(lambda: world.metric("requests_in_flight") == FAST.driver.max_requests, "full")
    async with AsyncWeirClient(world.grpc_address) as client:
        with pytest.raises(Overloaded, match="16 requests are in flight, at most 16"):
            await client.tokenize("abc")
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        await world.until_idle()
        assert await client.tokenize("abc") == [97, 98, 99]

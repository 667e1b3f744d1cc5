"""A client that stops reading its stream loses that stream, and nobody else's: over a real socket."""

import asyncio
import contextlib
import json
import socket

import httpx
import pytest
from tests.unit.gateway.fake_workers import token_logprobs, update
from tests.unit.gateway.world import World, open_world

NUM_TOKENS, NUM_TOP = 10_000, 20
"""12 MB of events: more than the kernel takes for a client that does not read."""
SEND_TIMEOUT_S = 0.5


async def start_unread(world: World) -> socket.socket:
    """A stream whose client reads nothing; its worker has sent much of the answer, and has more to come."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", httpx.URL(world.http_url).port))
    body = {"prompt": "x", "max_tokens": 200_000, "stream": True, "logprobs": NUM_TOP}
    data = json.dumps({"model": "bytes", **body}).encode()
    await loop.sock_sendall(
        client, b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n" % len(data)
    )
    await loop.sock_sendall(client, data)
    await world.until(lambda: world.pair.starts, "it has started")
    [request_id] = world.pair.starts
    for start in range(1, NUM_TOKENS, 100):
        logprobs = [token_logprobs(120, NUM_TOP)] * 100
        world.decode.send(update(request_id, start, [120] * 100, logprobs=logprobs))
        await asyncio.sleep(0)
    return client


@pytest.mark.timeout(120)
async def test_a_stream_over_http_that_is_not_read_ends_and_its_sequence_is_cancelled_while_others_go_on() -> None:
    async with open_world(send_timeout_s=SEND_TIMEOUT_S, max_context=300_000) as world:
        world.pair.stops_after = 1
        unread = await start_unread(world)
        world.pair.stops_after = None
        async with world.http_client() as http:
            fields = {"model": "bytes", "prompt": "y", "max_tokens": 64, "stream": True}
            answer = await http.post("/v1/completions", json=fields)
        assert answer.text.endswith("data: [DONE]\n\n")
        await world.until(lambda: world.decode.named("cancel"), "the worker got the cancel", timeout_s=30)
        await world.until_idle()
        assert (world.metric("cancelled_total"), world.metric("finished_total")) == (1, 1)
        assert world.metric("entry_held") == 0
        unread.close()


async def test_a_stream_that_nobody_reads_when_the_gateway_ends_is_no_defect(caplog: pytest.LogCaptureFixture) -> None:
    async with open_world(max_context=300_000) as world:
        world.pair.stops_after = 1
        with contextlib.closing(await start_unread(world)):
            await world.gateway.stop()
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []

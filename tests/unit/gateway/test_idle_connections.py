"""Thousands of connections on which nothing is asked: held by both ports, whose clients are served as before."""

import asyncio
import resource
import time
from collections.abc import Iterator

import httpx
import pytest
from tests.unit.gateway.world import open_world

from weir.rpc.port_guard import PortLimits
from weir.runtime.process_tuning import raise_descriptor_limit
from weir.testing.load import greedy_request, stream
from weir_gateway.frontends.http_server import HttpSettings

NUM_IDLE = 5000
NUM_DESCRIPTORS = 2 * NUM_IDLE + 500
"""Both ends of each."""
FIRST_READ_TIMEOUT_S = min(HttpSettings().head_timeout_s, PortLimits(max_message_bytes=1, max_calls=1).read_timeout_s)
"""After which a port closes a connection on which nothing has come."""


@pytest.fixture(autouse=True)
def descriptors() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if raise_descriptor_limit() < NUM_DESCRIPTORS:
        pytest.skip(f"the hard limit of open files is below {NUM_DESCRIPTORS}")
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("port_of", ["http", "grpc"])
async def test_thousands_of_idle_connections_keep_nobody_out(port_of: str) -> None:
    async with open_world() as world, world.http_client() as http:
        url = world.http_url if port_of == "http" else f"http://{world.grpc_address}"
        port = httpx.URL(url).port
        assert port is not None
        began_s = time.monotonic()
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(NUM_IDLE)]
        answer = await http.post("/v1/completions", json={"model": "bytes", "prompt": "x", "max_tokens": 64})
        record = await stream(world.stub, greedy_request("y", max_tokens=64))
        num_open = sum(not reader.at_eof() for reader, _ in idle)
        num_counted = world.metric("http_connections")
        is_within_time = time.monotonic() - began_s < FIRST_READ_TIMEOUT_S
        for _, writer in idle:
            writer.transport.abort()
    assert (answer.status_code, record.text) == (200, "hello world")
    if is_within_time:
        assert num_open == NUM_IDLE
        assert num_counted == (NUM_IDLE if port_of == "http" else 0) + 1
    else:  # on a slow machine the first ones' time is over
        assert num_open > 0

"""Calls that ask for tokens or their text alone: how many wait at a time, for how long, and which are not read."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from tests.unit.gateway.test_access import CLOSED, KEY_A, KEY_B
from tests.unit.gateway.test_tenants_at_the_frontends import BODY, bearer, write
from tests.unit.gateway.world import FAST, World, open_world

from weir.client import AsyncWeirClient
from weir.core.errors import QuotaExceeded
from weir_gateway.requests.validation import Limits

LONG = {"prompt": "x" * 2049}
SHORT = {"prompt": "x"}
PATHS = ("/tokenize", "/detokenize")


@pytest.fixture
async def http(world: World) -> AsyncIterator[httpx.AsyncClient]:
    async with world.http_client(timeout=60) as client:
        yield client


@contextmanager
def busy(world: World) -> Iterator[None]:
    """What is tokenized in threads comes to no end meanwhile."""
    world.tokenizer.may_threads_encode.clear()
    try:
        yield
    finally:
        world.tokenizer.may_threads_encode.set()


async def calls(world: World, http: httpx.AsyncClient, key: str, num: int) -> list["asyncio.Task[httpx.Response]"]:
    """That wait, all of them."""
    tokenization = world.gateway.processor.tokenization
    wanted = tokenization.num_calls + num
    tasks = [asyncio.create_task(http.post("/tokenize", json=LONG, headers=bearer(key))) for _ in range(num)]
    await world.until(lambda: tokenization.num_calls == wanted, "they wait")
    return tasks


async def statuses_of_unread(world: World, key: str) -> list[bytes]:
    """What is answered to calls of which only the head comes."""
    lines = []
    for path in PATHS:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.gateway.http_port)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nX-API-Key: {key}\r\nContent-Length: 1000\r\n\r\n"
        writer.write(head.encode())
        lines.append((await asyncio.wait_for(reader.readline(), 5)).split()[1])
        writer.close()
        await writer.wait_closed()
    return lines


async def test_those_of_one_tenant_leave_room_for_others(world: World, http: httpx.AsyncClient) -> None:
    await write(world, CLOSED)
    with busy(world):
        waiting = await calls(world, http, KEY_A, 6)
        refused = await http.post("/tokenize", json=SHORT, headers=bearer(KEY_A))
        error: dict[str, Any] = refused.json()["error"]
        assert (refused.status_code, error["type"]) == (429, "rate_limit_error")
        assert "tenant a: 6 of its calls wait for tokens, at most 6" in error["message"]
        assert refused.headers["Retry-After"]
        async with AsyncWeirClient(world.grpc_address, api_key=KEY_A) as client:
            with pytest.raises(QuotaExceeded, match="tenant a: 6 of its calls"):
                await client.tokenize("x")
        assert (await http.post("/tokenize", json=SHORT, headers=bearer(KEY_B))).status_code == 200
        waiting += await calls(world, http, KEY_B, 2)
        full = await http.post("/detokenize", json={"tokens": [1]}, headers=bearer(KEY_B))
        assert (full.status_code, full.json()["error"]["code"]) == (429, "overloaded")
        assert "8 calls wait for tokens, at most 8" in full.json()["error"]["message"]
        answer = await http.post("/v1/completions", json=BODY, headers=bearer(KEY_A))
        assert answer.status_code == 200, "they take no room of requests"
    assert [response.status_code for response in await asyncio.gather(*waiting)] == [200] * 8
    assert (await http.post("/tokenize", json=LONG, headers=bearer(KEY_A))).status_code == 200


async def test_one_too_many_is_refused_before_it_is_read(world: World, http: httpx.AsyncClient) -> None:
    await write(world, CLOSED)
    with busy(world):
        waiting = await calls(world, http, KEY_A, 6)
        assert await statuses_of_unread(world, KEY_A) == [b"429", b"429"]
    await asyncio.gather(*waiting)


async def test_a_gateway_that_shuts_down_reads_none(world: World) -> None:
    await world.gateway.drain(0)
    assert await statuses_of_unread(world, "none") == [b"503", b"503"]


async def test_one_that_waits_too_long_is_told_so_and_gives_its_room_back() -> None:
    settings = replace(FAST, limits=Limits(max_tokenize_calls_of_tenant=1, tokenize_timeout_s=0.1))
    async with open_world(settings) as world, world.http_client(timeout=60) as http:
        with busy(world):
            for _ in range(2):
                late = await http.post("/tokenize", json=LONG)
                assert (late.status_code, late.json()["error"]["type"]) == (504, "timeout_error")
                assert "not done within 0.1 s, all that such a call may take" in late.json()["error"]["message"]
            assert world.gateway.processor.tokenization.num_calls == 0

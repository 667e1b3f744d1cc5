"""What the tests of failures share."""

import asyncio
import contextlib
from typing import Any

import httpx
import pytest
from tests.unit.gateway.world import World

from weir.client import AsyncWeirClient, GenerateOptions
from weir.core.errors import WeirError
from weir.testing.load import StreamRecord, greedy_request, stream

ONE_DISPATCH = pytest.mark.parametrize("max_dispatches", [1])
"""A request ends with what ends its first dispatch."""


def run(world: World, max_tokens: int = 11) -> "asyncio.Task[StreamRecord]":
    return asyncio.create_task(stream(world.stub, greedy_request("x", max_tokens=max_tokens)))


async def error_of(world: World, max_tokens: int = 11) -> tuple[WeirError, str]:
    """The error that ends a request, and the text before it."""
    text = ""
    async with AsyncWeirClient(world.grpc_address) as client:
        try:
            async for chunk in client.generate("x", GenerateOptions(max_tokens=max_tokens)):
                text += chunk.text
        except WeirError as error:
            return error, text
    raise AssertionError(f"no error came, but {text!r}")


async def assert_serves(world: World) -> None:
    world.pair.stops_after = None
    record = await run(world)
    assert record.text == "hello world"


def request_id_of(world: World) -> str:
    return next(iter(world.pair.starts))


async def lines_of_broken(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[str]:
    """Of a stream that is cut: what came before, without blank lines."""
    lines: list[str] = []
    with contextlib.suppress(httpx.RemoteProtocolError):
        async with http.stream("POST", path, json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                lines += [line] if line else []
            pytest.fail("its body has ended")
    return lines

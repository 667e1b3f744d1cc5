"""Streams that have nothing to say are kept alive, and one that breaks off does not look as if it had ended."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Literal

import httpx
import openai
import pytest
from tests.unit.gateway.world import FAST, World, open_world

from weir.bus.messages import RefusalReason, SubmitReply
from weir_gateway.frontends.event_stream import EventStream, StreamSettings

ASKED: dict[str, Any] = {"prompt": "x", "stream": True}


@asynccontextmanager
async def streaming(
    keep_alive_s: float, after_error: Literal["cut", "done"] = "cut"
) -> AsyncIterator[tuple[World, httpx.AsyncClient]]:
    streams = StreamSettings(keep_alive_s=keep_alive_s, after_error=after_error)
    one_dispatch = replace(FAST.driver, max_dispatches=1)
    settings = replace(FAST, http=replace(FAST.http, streams=streams), driver=one_dispatch)
    async with open_world(settings) as world, world.http_client() as client:
        yield world, client


async def broken_stream(http: httpx.AsyncClient, asked: dict[str, Any]) -> list[str]:
    """The lines of one that is cut."""
    lines: list[str] = []
    with contextlib.suppress(httpx.RemoteProtocolError):
        async with http.stream("POST", "/v1/completions", json=asked) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                lines += [line] if line else []
            pytest.fail("its body has ended")
    return lines


async def test_a_stream_that_waits_for_its_first_token_has_comments() -> None:
    async with streaming(keep_alive_s=0.05) as (world, http):
        world.scheduler.grants_at_once = False
        async with http.stream("POST", "/v1/completions", json=ASKED) as response:
            assert response.status_code == 200
            lines = response.aiter_lines()
            seen = [await anext(lines) for _ in range(4)]
            assert seen == [": keep-alive", ""] * 2
            await world.scheduler.grant(world.scheduler.submits[-1])
            rest = [line async for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]"


async def test_a_stream_that_waits_between_tokens_has_comments() -> None:
    async with streaming(keep_alive_s=0.05) as (world, http):
        world.pair.stops_after = 2
        async with http.stream("POST", "/v1/completions", json=ASKED) as response:
            async for line in response.aiter_lines():
                if line == ": keep-alive":
                    break


async def test_what_a_client_reads_is_the_same_with_comments_in_it() -> None:
    async with streaming(keep_alive_s=0.03) as (world, _):
        world.scheduler.grants_at_once = False
        async with openai.AsyncOpenAI(base_url=f"{world.http_url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.completions.create(model="bytes", prompt="x", stream=True)
            await asyncio.sleep(0.15)
            await world.scheduler.grant(world.scheduler.submits[-1])
            assert "".join([chunk.choices[0].text async for chunk in stream]) == "hello world"


async def test_a_stream_that_goes_on_has_none() -> None:
    """Timers of one loop run in the order they are due, however late: there is an event in each interval."""
    interval_s = 0.04
    sent: list[bytes] = []

    async def events() -> AsyncIterator[bytes]:
        for number in range(16):
            await asyncio.sleep(interval_s / 4)
            yield b"%d," % number

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message.get("body", b""))

    async def receive() -> dict[str, str]:
        await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    stream = EventStream(events(), lambda: None, StreamSettings(keep_alive_s=interval_s), {})
    await stream({}, receive, send)
    assert b"".join(sent) == b"".join(b"%d," % number for number in range(16))


async def test_a_refusal_after_a_comment_is_an_event_and_before_it_a_status() -> None:
    async with streaming(keep_alive_s=0.05) as (world, http):
        refusal = SubmitReply(5, False, RefusalReason.QUEUE_FULL, "lane standard is full", 2100)
        world.scheduler.refusal = refusal
        assert (await http.post("/v1/completions", json=ASKED)).status_code == 429
        world.scheduler.refusal = None
        world.scheduler.grants_at_once = False
        comment, *_, error = await broken_stream(http, {**ASKED, "deadline_ms": 200})
        assert comment == ": keep-alive"
        assert '"code":"deadline_exceeded"' in error


async def test_by_a_setting_a_stream_that_breaks_off_ends_with_done() -> None:
    async with streaming(0, after_error="done") as (world, http):
        world.pair.stops_after = 4
        asking = asyncio.create_task(http.post("/v1/completions", json=ASKED))
        await world.until(lambda: world.scheduler.prefilled, "runs")
        await world.decode.stop()
        *_, error, done = [line for line in (await asking).text.splitlines() if line]
        assert '"error":' in error
        assert done == "data: [DONE]"


@pytest.mark.parametrize("wants", [{"include_usage": True, "continuous_usage_stats": True}, {"include_usage": True}])
async def test_token_counts_come_at_the_end_or_all_the_time(wants: dict[str, bool]) -> None:
    async with (
        streaming(0) as (world, _),
        openai.AsyncOpenAI(base_url=f"{world.http_url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = await client.chat.completions.create(
            model="bytes",
            messages=[{"role": "user", "content": "x"}],
            stream=True,
            extra_body={"stream_options": wants},
        )
        chunks = [chunk async for chunk in stream]
    *before, last = chunks
    assert last.usage is not None
    assert (last.choices, last.usage.completion_tokens) == ([], 11)
    counts = [chunk.usage.completion_tokens for chunk in before if chunk.usage is not None]
    if "continuous_usage_stats" in wants:
        assert len(counts) == len(before)
        assert counts == sorted(counts)
        assert counts[-1] == 11
    else:
        assert counts == []

"""Clients of keyed requests that lose their HTTP connection and come back: nothing is lost to the old connection, and
coming back takes no room."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from tests.unit.gateway.fake_model import ids_of
from tests.unit.gateway.fake_workers import GOING_ON, STOP, update
from tests.unit.gateway.world import FAST, World, open_world

from weir.bus.queue_report import LaneReport, QueueReport, TenantQueue
from weir.bus.subjects import Subjects
from weir_gateway.keys.keyed_requests import KeySettings

KEY = {"Idempotency-Key": "order-66"}
ANSWER = "hello wide world"
NUM_BEFORE = 4
SLOW = replace(FAST, keys=KeySettings(resume_s=60.0), driver=replace(FAST.driver, no_progress_s=60.0))
"""However long the test takes, the request that it comes back to is there."""
BODY: dict[str, Any] = {"prompt": "Say hello", "max_tokens": 40}
PATH = "/v1/completions"


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with open_world(SLOW) as world:
        world.pair.answer = ids_of(ANSWER)
        world.pair.stops_after = NUM_BEFORE
        yield world
        await end_all(world)


@pytest.fixture
async def http(world: World) -> AsyncIterator[httpx.AsyncClient]:
    async with world.http_client(timeout=10) as client:
        yield client


async def end_all(world: World) -> None:
    for request_id in world.pair.starts:
        await send_rest(world, request_id)


async def send_rest(world: World, request_id: str) -> None:
    """Each token in a frame of its own."""
    dispatch = world.pair.starts[request_id].attempt.dispatch
    for index in range(NUM_BEFORE, len(ANSWER)):
        finish = STOP if index == len(ANSWER) - 1 else GOING_ON
        world.decode.send(update(request_id, index, ids_of(ANSWER[index]), finish=finish, dispatch=dispatch))
        await asyncio.sleep(0.005)


def text_of(events: str) -> str:
    chunks = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk.get("choices"))


async def lose_connection(world: World, headers: dict[str, str], *, is_stream: bool) -> None:
    """Returns when the gateway has seen that it is gone."""
    body = BODY | {"stream": is_stream}
    async with world.http_client(timeout=10) as client:
        if is_stream:
            async with client.stream("POST", PATH, json=body, headers=headers) as response:
                assert response.status_code == 200, await response.aread()
                async for line in response.aiter_lines():
                    if line == f"id: {NUM_BEFORE}":
                        break
        else:
            asking = asyncio.create_task(client.post(PATH, json=body, headers=headers))
            await world.until(lambda: world.metric("keys_held") == 1, "it runs")
            await asyncio.sleep(0.05)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
    await world.until(lambda: world.metric("keys_kept") == 1, "its client is missed")


async def test_a_stream_that_is_gone_on_with_lacks_nothing(world: World, http: httpx.AsyncClient) -> None:
    await lose_connection(world, KEY, is_stream=True)
    headers = KEY | {"Last-Event-ID": str(NUM_BEFORE)}
    coming = asyncio.create_task(http.post(PATH, json=BODY | {"stream": True}, headers=headers))
    await world.until(lambda: world.metric("keys_attached_total") == 1, "it is back")
    await end_all(world)
    assert text_of((await coming).text) == ANSWER[NUM_BEFORE:]
    assert len(world.scheduler.submits) == 1


async def test_a_whole_answer_that_is_asked_for_again_lacks_nothing(world: World, http: httpx.AsyncClient) -> None:
    await lose_connection(world, KEY, is_stream=False)
    coming = asyncio.create_task(http.post(PATH, json=BODY, headers=KEY))
    await world.until(lambda: world.metric("keys_attached_total") == 1, "it is back")
    await end_all(world)
    answer = await coming
    assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, ANSWER)
    assert answer.json()["usage"]["completion_tokens"] == len(ANSWER)
    assert len(world.scheduler.submits) == 1


async def test_coming_back_often_holds_no_more_than_one_request_does(world: World) -> None:
    await lose_connection(world, KEY, is_stream=True)
    for _ in range(FAST.driver.max_requests + 2):
        await lose_connection(world, KEY | {"Last-Event-ID": "0"}, is_stream=True)
        assert world.metric("entry_held") == 1
    await end_all(world)
    await world.until_idle()
    assert world.metric("entry_held") == 0


async def test_a_full_gateway_still_has_room_for_the_client_of_a_request_that_it_holds() -> None:
    settings = replace(SLOW, driver=replace(SLOW.driver, max_requests=1))
    async with open_world(settings) as world, world.http_client(timeout=10) as http:
        world.pair.answer, world.pair.stops_after = ids_of(ANSWER), NUM_BEFORE
        await lose_connection(world, KEY, is_stream=True)
        for headers in ({}, {"Idempotency-Key": "another"}):
            assert (await http.post(PATH, json=BODY, headers=headers)).status_code == 429
        other_body = await http.post(PATH, json=BODY | {"prompt": "another"}, headers=KEY)
        assert other_body.status_code == 409
        headers = KEY | {"Last-Event-ID": str(NUM_BEFORE)}
        coming = asyncio.create_task(http.post(PATH, json=BODY | {"stream": True}, headers=headers))
        await world.until(lambda: world.metric("keys_attached_total") == 1, "it is back")
        await end_all(world)
        assert text_of((await coming).text) == ANSWER[NUM_BEFORE:]


async def test_a_long_queue_keeps_nobody_from_a_request_that_runs_already(
    world: World, http: httpx.AsyncClient
) -> None:
    await lose_connection(world, KEY, is_stream=True)
    lane = LaneReport("bytes", "", 500, 500, 8000, 10.0, 0.1, tenants=(TenantQueue("default", 500),))
    lanes = tuple(replace(lane, lane=name) for name in ("interactive", "standard", "batch"))
    await world.scheduler._endpoint.publish(Subjects(FAST.instance).queues, QueueReport(5, lanes))
    await world.until(lambda: world.metric("queue_reports_total"), "the report has come")
    assert (await http.post(PATH, json=BODY)).status_code == 429
    await lose_connection(world, KEY | {"Last-Event-ID": "0"}, is_stream=True)

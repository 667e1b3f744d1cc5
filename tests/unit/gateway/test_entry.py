"""A flood at the frontends: refused with a time to try again, before anything is done for it."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from tests.unit.gateway.fake_scheduler import INSTANCE, OPEN_RULES
from tests.unit.gateway.test_access import CLOSED, KEY_A
from tests.unit.gateway.test_tenants_at_the_frontends import bearer, write
from tests.unit.gateway.world import FAST, World, open_world

from weir.bus.configuration import TenantAccess
from weir.bus.queue_report import LaneReport, QueueReport, TenantQueue
from weir.bus.subjects import Subjects
from weir.client.gateway import AsyncWeirClient
from weir.core.errors import Overloaded
from weir.core.options import GenerateOptions
from weir_gateway.entry.pace import Pace

LANE = LaneReport("bytes", "standard", 500, 500, 8000, 10.0, 0.1, tenants=(TenantQueue("default", 500),))
BODY = {"model": "bytes", "prompt": "hello", "max_tokens": 4, "stream": True}


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with open_world() as world:
        yield world


async def report(world: World, *lanes: LaneReport) -> None:
    """Returns when the gateway has it."""
    endpoint = world.scheduler._endpoint
    num_before = world.metric("queue_reports_total")
    await endpoint.publish(Subjects(INSTANCE).queues, QueueReport(5, lanes))
    await world.until(lambda: world.metric("queue_reports_total") > num_before, "the report has come")


async def test_by_http_a_request_that_would_wait_too_long_is_429_with_retry_after_and_not_tokenized(
    world: World,
) -> None:
    await report(world, LANE)
    tokenized = world.tokenizer.num_encoded
    async with world.http_client() as http:
        response = await http.post("/v1/completions", json=BODY)
    assert response.status_code == 429
    assert 46 <= int(response.headers["Retry-After"]) <= 58
    assert response.json()["error"]["code"] == "overloaded"
    assert "with 500 requests before it, it would wait for about 50 s" in response.json()["error"]["message"]
    assert (world.scheduler.submits, world.tokenizer.num_encoded) == ([], tokenized)
    assert (world.metric("entry_refused_total"), world.metric("rejected_overloaded_total")) == (1, 1)


async def test_the_share_of_a_tenant_counts_where_another_one_has_a_key_and_nowhere_else(world: World) -> None:
    filled = replace(LANE, num_queued=7500, num_queued_of_all_models=7500, s_per_request=0.0)
    unnamed = replace(OPEN_RULES, tenants=(TenantAccess("a"), TenantAccess("b"), TenantAccess("default")))
    async with world.http_client(headers=bearer(KEY_A)) as http:
        for rules, tenant, status in ((unnamed, "default", 200), (CLOSED, "a", 429)):
            await write(world, rules)
            await report(world, replace(filled, tenants=(TenantQueue(tenant, 7500),)))
            answer = await http.post("/v1/completions", json={**BODY, "stream": False})
            assert answer.status_code == status
    assert answer.json()["error"]["message"] == "tenant a: 7500 requests wait in lane standard, its share of it"


async def test_by_grpc_it_is_resource_exhausted_with_retry_info(world: World) -> None:
    await report(world, LANE)
    tokenized = world.tokenizer.num_encoded
    async with AsyncWeirClient(world.grpc_address) as client:
        with pytest.raises(Overloaded) as raised:
            async for _ in client.generate("hello", GenerateOptions(max_tokens=4)):
                pass
    assert raised.value.retry_after_s is not None
    assert 46 <= raised.value.retry_after_s <= 58
    assert (world.scheduler.submits, world.tokenizer.num_encoded) == ([], tokenized)


async def test_a_body_that_none_of_the_callers_lanes_would_take_is_not_read(world: World) -> None:
    lanes = [replace(LANE, lane=lane) for lane in ("interactive", "standard", "batch")]
    await report(world, *lanes)
    async with world.http_client() as http:
        assert (await http.post("/v1/completions", content=b"not json" * 100_000)).status_code == 429
        await report(world, LANE)
        assert (await http.post("/v1/completions", content=b"not json")).status_code == 400


async def test_a_lane_that_is_short_lets_in_while_another_is_long(world: World) -> None:
    await report(world, LANE)
    async with world.http_client() as http:
        response = await http.post("/v1/completions", json={**BODY, "lane": "interactive"})
        assert response.status_code == 200
        assert (await http.post("/v1/completions", json=BODY)).status_code == 429
        await report(world)
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200


async def test_when_all_have_ended_nothing_is_held(world: World) -> None:
    async with world.http_client() as http:
        answers = await asyncio.gather(*(http.post("/v1/completions", json=BODY) for _ in range(8)))
        wrong = await http.post("/v1/completions", json={**BODY, "max_tokens": -1})
    assert {answer.status_code for answer in answers} == {200}
    assert wrong.status_code == 400
    await world.until_idle()
    assert world.metric("entry_held") == 0


async def test_a_burst_is_answered_before_those_that_were_let_in_have_all_begun() -> None:
    settings = replace(FAST, driver=replace(FAST.driver, max_requests=8))
    async with open_world(settings) as world, world.http_client() as http:
        world.pair.stops_after = 0
        sent = [asyncio.create_task(http.post("/v1/completions", json=BODY)) for _ in range(24)]
        await world.until(lambda: sum(task.done() for task in sent) == 16, "all but eight are refused")
        assert {task.result().status_code for task in sent if task.done()} == {429}
        for task in sent:
            task.cancel()
        await asyncio.gather(*sent, return_exceptions=True)


async def test_so_many_begin_a_turn_in_their_order_and_one_that_left_takes_nobodys_turn() -> None:
    pace, begun = Pace(2), list[int]()

    async def begin(number: int) -> None:
        await pace.turn()
        begun.append(number)

    tasks = [asyncio.create_task(begin(number)) for number in range(7)]
    await asyncio.sleep(0)
    assert pace.num_waiting == 7
    tasks[1].cancel()
    seen = [0]
    while len(begun) < 6:
        await asyncio.sleep(0)
        seen.append(len(begun))
    await asyncio.gather(*tasks, return_exceptions=True)
    assert begun == [0, 2, 3, 4, 5, 6]
    assert all(later - earlier <= 2 for earlier, later in itertools.pairwise(seen))

"""GET /metrics of a whole gateway, read with prometheus-client's parsers."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import openai
import pytest
from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from tests.unit.gateway.fake_model import MAX_CONTEXT
from tests.unit.gateway.fake_scheduler import INSTANCE
from tests.unit.gateway.test_access import CLOSED, KEY_A
from tests.unit.gateway.test_tenants_at_the_frontends import bearer, write
from tests.unit.gateway.world import FAST, World, open_world

from weir.bus.codec import encode
from weir.bus.messages import LEADER_KEY, LeaderRecord, WorkerRecord
from weir.bus.subjects import WORKER_TTL_S, Subjects
from weir.core.addresses import LOOPBACK
from weir.rpc.server import make_server
from weir.runtime.admin import AdminService, Description, Identity
from weir.telemetry.catalog.histograms import CALL_EDGES, HAND_OFF
from weir.telemetry.described import HistogramFigure
from weir.telemetry.histogram import Histogram
from weir.wire.v1 import admin_pb2_grpc, worker_pb2

OPENMETRICS = {"Accept": "application/openmetrics-text; version=1.0.0"}


@pytest.fixture
async def http(world: World) -> AsyncIterator[httpx.AsyncClient]:
    async with world.http_client(timeout=30) as client:
        yield client


async def scraped(http: httpx.AsyncClient, **headers: str) -> dict[str, Metric]:
    await asyncio.sleep(0.3)  # what was kept is older then
    response = await http.get("/metrics", headers=headers)
    assert response.status_code == 200
    parse = parse_openmetrics if "openmetrics" in response.headers["content-type"] else parse_text
    return {metric.name: metric for metric in parse(response.text)}


def value_of(metric: Metric, suffix: str = "", **labels: str) -> float:
    [found] = [
        sample.value
        for sample in metric.samples
        if sample.name == metric.name + suffix and labels.items() <= sample.labels.items()
    ]
    return float(found)


async def ask(world: World, num_requests: int = 1, **fields: object) -> None:
    async with openai.AsyncOpenAI(base_url=f"{world.http_url}/v1", api_key="none", max_retries=0) as client:
        for _ in range(num_requests):
            await client.completions.create(model="bytes", prompt="Say hello", max_tokens=5, extra_body=fields)
    await world.until_idle()


async def test_a_load_is_counted_as_it_was_sent(world: World, http: httpx.AsyncClient) -> None:
    await ask(world, 3)
    await ask(world, 1, n=2, lane="batch")
    found = await scraped(http)
    assert value_of(found["weir_gateway_requests_finished"], "_total", process="gateway-0-00000000") == 5.0
    ttft = found["weir_time_to_first_token_seconds"]
    assert value_of(ttft, "_count", model="bytes", lane="standard") == 3.0
    assert value_of(ttft, "_count", model="bytes", lane="batch") == 2.0
    assert value_of(ttft, "_bucket", lane="batch", le="+Inf") == 2.0
    assert value_of(found["weir_lane_output_tokens"], "_total", lane="standard") == 15.0
    for stage in ("queue", "start", "prefill", "hand_off", "decode"):
        assert value_of(found["weir_stage_seconds"], "_count", stage=stage, lane="standard") == 3.0
    assert value_of(found["vllm:generation_tokens"], "_total", model_name="bytes", engine="0") == 25.0
    assert value_of(found["vllm:time_to_first_token_seconds"], "_count") == 5.0
    assert value_of(found["vllm:request_prompt_tokens"], "_sum") == 9.0 * 5
    assert value_of(found["vllm:request_params_n"], "_sum") == 3.0 + 2.0
    assert value_of(found["vllm:request_success"], "_total", finished_reason="length") == 5.0
    assert value_of(found["vllm:num_requests_running"]) == value_of(found["vllm:num_requests_waiting"]) == 0.0
    assert "vllm:kv_cache_usage_perc" not in found


async def test_each_prompt_of_a_list_is_counted_once_and_by_its_own_answers(
    world: World, http: httpx.AsyncClient
) -> None:
    prompts = ["Say hello", "Hi"]
    seen: Counter[bytes] = Counter()

    def num_cached_of(start: worker_pb2.Start) -> int:
        """The second answer finds all that the first one computed."""
        prompt = bytes(start.prompt_token_ids)
        seen[prompt] += 1
        return 1 if seen[prompt] == 1 else len(prompt)

    world.pair.num_cached_of = num_cached_of
    world.pair.answer_to = lambda start: list(b"long answer" if len(start.prompt_token_ids) == 9 else b"ok")
    async with openai.AsyncOpenAI(base_url=f"{world.http_url}/v1", api_key="none", max_retries=0) as client:
        await client.completions.create(model="bytes", prompt=prompts, n=2, max_tokens=MAX_CONTEXT - 2)
    await world.until_idle()
    found = await scraped(http)
    assert value_of(found["weir_lane_prompt_tokens"], "_total", lane="standard") == 9.0 + 2.0
    assert value_of(found["vllm:prompt_tokens"], "_total") == 9.0 + 2.0
    assert value_of(found["vllm:prompt_tokens_cached"], "_total") == 1.0 + 1.0
    of_prompts = {
        "request_params_n": (2, 2 + 2),
        "request_max_num_generation_tokens": (2, len("long answer") + len("ok")),
        "request_params_max_tokens": (4, 2 * (MAX_CONTEXT - 9) + 2 * (MAX_CONTEXT - 2)),
    }
    for name, expected in of_prompts.items():
        metric = found[f"vllm:{name}"]
        assert (value_of(metric, "_count"), value_of(metric, "_sum")) == expected, name


async def test_prompts_without_a_first_token_are_not_counted(world: World, http: httpx.AsyncClient) -> None:
    world.pair.stops_after = 0
    asking = asyncio.create_task(ask(world, n=2))
    await world.until(lambda: len(world.pair.starts) == 2, "both have begun")
    asking.cancel()
    await asyncio.wait([asking])
    await world.until_idle()
    found = await scraped(http)
    assert value_of(found["vllm:request_success"], "_total", finished_reason="abort") == 2.0
    assert value_of(found["vllm:prompt_tokens"], "_total") == 0.0
    assert value_of(found["vllm:request_params_n"], "_count") == 0.0


async def test_openmetrics_leads_from_a_bucket_to_its_trace(world: World, http: httpx.AsyncClient) -> None:
    await ask(world)
    found = await scraped(http, **OPENMETRICS)
    traces = {format(span.context.trace_id, "032x") for span in world.spans.get_finished_spans() if span.context}
    for name in ("weir_time_to_first_token_seconds", "weir_request_seconds", "weir_stage_seconds"):
        seen = [sample.exemplar.labels["trace_id"] for sample in found[name].samples if sample.exemplar]
        assert len(seen) == 1
        assert set(seen) <= traces
    assert [sample.name for sample in found["vllm:num_requests_running"].samples] == ["vllm:num_requests_running"]


async def test_where_keys_are_in_force_it_needs_one_wherever_it_is_asked_from(
    world: World, http: httpx.AsyncClient
) -> None:
    await ask(world)
    assert "weir_gateway_requests_finished" in await scraped(http)
    await write(world, CLOSED)
    # A proxy on the machine, which names nobody, asks like this.
    assert (await http.get("/metrics")).status_code == 401
    assert (await http.get("/metrics", headers=bearer("nobody's"))).status_code == 401
    assert "weir_gateway_requests_finished" in await scraped(http, **bearer(KEY_A))


async def test_no_tenant_is_on_it(world: World, http: httpx.AsyncClient) -> None:
    await ask(world)
    assert world.metric('tenant_output_tokens_total{tenant="default"}') == 5.0
    assert [name for name in await scraped(http) if "weir_tenant" in name] == []


@asynccontextmanager
async def served(role: str, description: Description) -> AsyncIterator[str]:
    server = make_server()
    admin_pb2_grpc.add_AdminServicer_to_server(
        AdminService(Identity(role, f"{role}-0-cc", "bytes"), lambda: description), server
    )
    port = server.add_insecure_port(f"{LOOPBACK}:0")
    await server.start()
    try:
        yield f"{LOOPBACK}:{port}"
    finally:
        await server.stop(None)


def worker_at(address: str, worker_id: str, arena_address: str) -> WorkerRecord:
    return WorkerRecord(
        worker_id, "prefill", "bytes", address, "host", 100, 16, 64, 4, 0, 0, arena_address=arena_address
    )


async def test_the_other_processes_are_on_the_page_as_long_as_they_answer(
    world: World, http: httpx.AsyncClient
) -> None:
    hand_offs = Histogram(CALL_EDGES)
    hand_offs.observe_traced(0.002, "ab" * 16, 5.0)
    of_worker = Description(
        {"preemptions_total": 2.0, "steps_total": 9.0}, histograms=[HistogramFigure(HAND_OFF.name, hand_offs.value())]
    )
    of_arena = Description({"total_pages": 64.0, "free_pages": 32.0, "cached_pages": 0.0})
    bus, subjects = world.hub.connect(), Subjects(INSTANCE)
    workers = await bus.bucket(subjects.workers_bucket, ttl_s=WORKER_TTL_S)
    leader = await bus.bucket(subjects.leader_bucket, durable=True)
    async with served("transfer", of_arena) as arena, served("scheduler", Description({"queued": 3.0})) as scheduler:
        await leader.put(LEADER_KEY, encode(LeaderRecord("s", 1, address=scheduler)))
        async with served("prefill", of_worker) as address:
            for record in (
                worker_at(address, "prefill-0-cc", arena),
                worker_at("127.0.0.1:1", "dead", "unix:/nowhere"),
            ):
                await workers.put(record.worker_id, encode(record))
            found = await scraped(http, **OPENMETRICS)
        assert value_of(found["weir_worker_steps"], "_total", role="prefill", process="prefill-0-cc") == 9.0
        assert value_of(found["weir_scheduler_requests_queued"]) == 3.0
        assert value_of(found["weir_arena_pages"]) == 64.0
        assert value_of(found["vllm:kv_cache_usage_perc"], model_name="bytes") == 0.5
        assert value_of(found["vllm:num_preemptions"], "_total") == 2.0
        [exemplar] = [one.exemplar for one in found[HAND_OFF.name].samples if one.exemplar]
        assert (exemplar.labels, exemplar.value) == ({"trace_id": "ab" * 16}, 0.002)
        await asyncio.sleep(1.0)
        gone = await scraped(http)
    assert "weir_worker_steps" not in gone
    assert value_of(gone["weir_arena_pages"]) == 64.0
    await bus.close()


async def test_vllms_names_can_be_left_out() -> None:
    settings = replace(FAST, has_vllm_metrics=False)
    async with open_world(settings) as world, world.http_client() as http:
        found = await scraped(http)
    assert "weir_gateway_requests_finished" in found
    assert [name for name in found if name.startswith("vllm:")] == []


async def test_what_is_asked_for_at_once_is_made_once(world: World, http: httpx.AsyncClient) -> None:
    answers = await asyncio.gather(*(http.get("/metrics") for _ in range(5)))
    assert len({answer.text for answer in answers}) == 1

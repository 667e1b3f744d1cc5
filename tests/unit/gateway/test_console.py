"""The snapshot of a stack, who gets it, and the page that shows it."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest
from tests.unit.gateway.metrics.test_neighbours import register
from tests.unit.gateway.metrics.test_page import served, worker_at
from tests.unit.gateway.test_access import KEY_A
from tests.unit.gateway.test_recent_requests import GUARDED, OPERATOR
from tests.unit.gateway.test_tenants_at_the_frontends import bearer, write
from tests.unit.gateway.world import FAST, GATEWAY_ID, World, open_world

from weir.bus.messages import WorkerRecord
from weir.client.stack import StackClient
from weir.core.errors import PermissionDenied, Unauthenticated, Unavailable
from weir.runtime.admin import Description
from weir.telemetry.catalog.histograms import TTFT
from weir.telemetry.described import Described, HistogramFigure
from weir.telemetry.histogram import Histogram, HistogramValue
from weir.telemetry.internals import PageMap, PageRange, SequenceShare, StepRecord
from weir_gateway.frontends.console.snapshot import MAX_TENANTS, StackFigures, snapshot_of

WORKER = WorkerRecord("decode-0-aa", "decode", "m", "1.2.3.4:5", "host", 8192, 16, 100, 32, 3, 1)
PATHS = ("/debug/stack", "/debug/stack/events", "/debug/steps", "/debug/pages")


def first_tokens(*seconds: float) -> HistogramValue:
    histogram = Histogram((0.1, 1.0, 10.0))
    for value in seconds:
        histogram.observe(value)
    return histogram.value()


def gateway(ttft: HistogramValue | None = None, **metrics: float) -> Described:
    labels = (("model", "m"), ("lane", "batch"))
    return Described("gateway", "g", metrics, [HistogramFigure(TTFT.name, ttft, labels)] if ttft else [])


def figures(now_s: float, gateway: Described, **others: object) -> StackFigures:
    return StackFigures(now_s, 1000.0 + now_s, gateway, **others)  # type: ignore[arg-type]


def test_rates_and_percentiles_are_of_what_came_since() -> None:
    past = figures(0.0, gateway(first_tokens(5.0, 5.0, 5.0)))
    recent = figures(55.0, gateway(accepted_total=10.0, output_tokens_total=100.0))
    now = figures(
        60.0, gateway(first_tokens(5.0, 5.0, 5.0, 0.05, 0.05), accepted_total=20.0, output_tokens_total=600.0)
    )
    snapshot = snapshot_of(now, recent, past)
    assert snapshot.gateway.requests_per_s == 2.0
    assert snapshot.gateway.output_tokens_per_s == 100.0
    assert snapshot.latency_window_s == 60.0
    (latency,) = snapshot.latencies
    assert (latency.name, latency.lane, latency.num) == ("time_to_first_token", "batch", 2)
    assert latency.p99_ms is not None
    assert latency.p99_ms <= 100.0


def test_without_a_past_there_are_no_rates_and_latencies_are_since_the_start() -> None:
    snapshot = snapshot_of(figures(60.0, gateway(first_tokens(5.0), accepted_total=20.0)), None, None)
    assert snapshot.gateway.requests_per_s is None
    assert snapshot.latency_window_s is None
    assert snapshot.latencies[0].num == 1
    assert snapshot.scheduler is None
    assert snapshot.lanes == ()


def test_a_process_that_started_anew_has_no_rate() -> None:
    before = figures(0.0, replace(gateway(accepted_total=50.0), process_id="earlier"))
    assert snapshot_of(figures(5.0, gateway(accepted_total=1.0)), before, before).gateway.requests_per_s is None


def test_a_worker_that_does_not_answer_is_shown_as_silent() -> None:
    described = Described("decode", "decode-0-aa", {"num_running": 7.0, "steps_total": 30.0})
    silent = snapshot_of(figures(5.0, gateway(), registered=[WORKER]), None, None).workers
    heard = figures(5.0, gateway(), registered=[WORKER], workers={"decode-0-aa": described})
    draining = replace(WORKER, is_draining=True)
    assert [(one.duty, one.num_running) for one in silent] == [("silent", 3)]
    assert [(one.duty, one.num_running) for one in snapshot_of(heard, None, None).workers] == [("serving", 7)]
    assert snapshot_of(replace(heard, registered=[draining]), None, None).workers[0].duty == "draining"


def test_lanes_are_in_their_order_and_tenants_by_their_tokens() -> None:
    scheduler = Described(
        "scheduler",
        "s",
        {'lane_in_flight{lane="batch"}': 2.0, 'lane_in_flight{lane="interactive"}': 1.0, "queued_batch": 9.0},
    )
    tenants = {f'tenant_accepted_total{{tenant="t{index}"}}': 1.0 for index in range(MAX_TENANTS + 5)}
    tenants['tenant_output_tokens_total{tenant="t54"}'] = 100.0
    now = figures(5.0, Described("gateway", "g", tenants), others=[scheduler], lanes=("interactive", "batch"))
    snapshot = snapshot_of(now, None, None)
    assert [(lane.lane, lane.num_queued, lane.num_in_flight) for lane in snapshot.lanes] == [
        ("interactive", 0, 1),
        ("batch", 9, 2),
    ]
    assert len(snapshot.tenants) == MAX_TENANTS
    assert snapshot.tenants[0].tenant == "t54"


@pytest.fixture
async def http(world: World) -> AsyncIterator[httpx.AsyncClient]:
    async with world.http_client(timeout=60) as client:
        yield client


@pytest.mark.parametrize("path", PATHS)
async def test_operators_alone_are_answered(world: World, http: httpx.AsyncClient, path: str) -> None:
    await write(world, GUARDED)
    assert (await http.get(path)).status_code == 401
    assert (await http.get(path, headers=bearer(KEY_A))).status_code == 403
    async with http.stream("GET", path, headers=bearer(OPERATOR)) as answer:
        assert answer.status_code == 200


async def test_the_page_loads_without_a_key_and_may_load_nothing_else(world: World, http: httpx.AsyncClient) -> None:
    await write(world, GUARDED)
    page = await http.get("/console")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    files = set(re.findall(r'(?:href|src)="(console/[^"]+)"', page.text))
    assert {"console/console.js", "console/console.css", "console/icon.svg"} == files
    assert not re.search(r"https?://|<script>|<style|\son\w+=|\sstyle=", page.text)
    for file in files | {"console/dom.js", "console/memory.js"}:
        answer = await http.get(f"/{file}")
        assert answer.status_code == 200
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", answer.text)
        assert all(module.startswith("./") for module in re.findall(r'from "([^"]+)"', answer.text))


async def test_snapshots_are_pushed_to_so_many_watchers_at_most() -> None:
    async with (
        open_world(replace(FAST, max_console_watchers=1)) as world,
        world.http_client(timeout=60) as http,
    ):
        async with http.stream("GET", "/debug/stack/events") as watching:
            first = json.loads((await anext(watching.aiter_lines())).removeprefix("data: "))
            assert first["gateway"]["process_id"] == GATEWAY_ID
            assert first["gateway"]["num_watchers"] == 1
            refused = await http.get("/debug/stack/events")
            assert refused.status_code == 429
            assert "max_console_watchers is 1" in refused.json()["error"]["message"]
        async with asyncio.timeout(20):
            while world.gateway.describe().metrics["console_watchers"]:  # noqa: ASYNC110 - nobody is told of it
                await asyncio.sleep(0.02)
        async with http.stream("GET", "/debug/stack/events") as watching:
            assert watching.status_code == 200


async def test_steps_and_pages_are_asked_of_whom_they_are(world: World, http: httpx.AsyncClient) -> None:
    step = StepRecord(7, 1000.5, 12.5, 2, 9, 8, (SequenceShare("id-1", 8), SequenceShare("id-2", 0)))
    pages = PageMap(3, 2, (PageRange(1, 1, 0, 0, 0), PageRange(0, 0, 0, 1, 0)))
    asked: list[int] = []

    def list_steps(max_steps: int) -> list[StepRecord]:
        asked.append(max_steps)
        return [step]

    bus = world.hub.connect()
    async with (
        served("transfer", Description(map_pages=lambda max_ranges: pages)) as arena,
        served("decode", Description(list_steps=list_steps)) as worker,
    ):
        await register(bus, worker_at(worker, "decode-9-cc", arena))
        (steps,) = [
            one for one in (await http.get("/debug/steps")).json()["workers"] if one["worker_id"] == "decode-9-cc"
        ]
        assert steps["steps"][0]["sequences"][0] == {"request_id": "id-1", "num_prompt_tokens": 8}
        assert steps["steps"][0]["duration_ms"] == 12.5
        assert asked == [64]
        (arena_pages,) = (await http.get("/debug/pages")).json()["arenas"]
        assert arena_pages["worker_ids"] == ["decode-9-cc"]
        assert arena_pages["pages"]["ranges"][1] == {
            "num_free": 0,
            "num_leased": 0,
            "num_orphaned": 0,
            "num_cached": 1,
            "num_shared": 0,
        }


async def test_the_client_says_what_it_is_refused_for(world: World) -> None:
    stranger, operator = StackClient(world.http_url), StackClient(world.http_url, admin_key=OPERATOR)
    tenant, nobody = StackClient(world.http_url, admin_key=KEY_A), StackClient("http://127.0.0.1:1")
    assert (await stranger.snapshot()).gateway.process_id == GATEWAY_ID
    await write(world, GUARDED)
    assert (await operator.snapshot()).gateway.process_id == GATEWAY_ID
    with pytest.raises(Unauthenticated, match="an admin key is needed"):
        await stranger.snapshot()
    with pytest.raises(PermissionDenied, match="tenant's key"):
        await tenant.snapshot()
    with pytest.raises(Unavailable, match="does not answer"):
        await nobody.snapshot()
    for client in (stranger, operator, tenant, nobody):
        await client.close()

"""`X-Request-Id`: what a client calls its request comes back, is in the trace and the log, and means nothing else."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator

import httpx
import pytest
from tests.unit.gateway.failing import ONE_DISPATCH
from tests.unit.gateway.test_access import CLOSED
from tests.unit.gateway.test_tenants_at_the_frontends import write
from tests.unit.gateway.world import World

MADE = re.compile("[0-9a-f]{32}")
LONGEST = "!" * 127 + "~"
BODY = {"prompt": "x", "max_tokens": 5}


@pytest.fixture
async def http(world: World) -> AsyncIterator[httpx.AsyncClient]:
    async with world.http_client() as client:
        yield client


@pytest.mark.parametrize("correlation_id", ["mine/7", "x", LONGEST])
async def test_it_comes_back_on_whatever_is_answered(http: httpx.AsyncClient, correlation_id: str) -> None:
    headers = {"X-Request-Id": correlation_id}
    answers = [
        (200, await http.get("/v1/models", headers=headers)),
        (200, await http.get("/health", headers=headers)),
        (200, await http.post("/ping", headers=headers)),
        (200, await http.post("/v1/completions", json=BODY, headers=headers)),
        (200, await http.post("/v1/completions", json=BODY | {"stream": True}, headers=headers)),
        (400, await http.post("/v1/completions", content=b"{", headers=headers)),
        (404, await http.post("/v1/completions", json=BODY | {"model": "gpt-x"}, headers=headers)),
        (404, await http.get("/v1/nothing", headers=headers)),
        (404, await http.get("/version/", headers=headers)),
        (405, await http.get("/v1/completions", headers=headers)),
        (413, await http.post("/tokenize", content=b"x" * (32 * 2**20 + 1), headers=headers)),
    ]
    assert [(answer.status_code, answer.headers["x-request-id"]) for _, answer in answers] == [
        (status, correlation_id) for status, _ in answers
    ]


async def test_it_comes_back_where_the_caller_is_not_known(world: World, http: httpx.AsyncClient) -> None:
    await write(world, CLOSED)
    refused = await http.get("/v1/models", headers={"X-Request-Id": "mine"})
    assert (refused.status_code, refused.headers["x-request-id"]) == (401, "mine")


async def test_it_comes_back_on_a_defect_and_is_in_the_log(
    world: World, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def list_models() -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(world.gateway.processor.models, "list_models", list_models)
    failed = await http.get("/v1/models", headers={"X-Request-Id": "mine"})
    assert (failed.status_code, failed.headers["x-request-id"]) == (500, "mine")
    [record] = [record for record in caplog.records if record.getMessage() == "GET /v1/models failed"]
    assert vars(record)["correlation_id"] == "mine"


@ONE_DISPATCH
async def test_it_is_in_the_lines_of_the_log_about_its_request(
    world: World, http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "weir_gateway")
    world.pair.stops_after = 2
    asking = asyncio.create_task(http.post("/v1/completions", json=BODY, headers={"X-Request-Id": "mine"}))
    await world.until(lambda: world.scheduler.prefilled, "runs")
    await world.decode.stop()
    assert (await asking).status_code == 503
    ours = [record for record in caplog.records if "dispatch 1" in record.getMessage()]
    assert [vars(record)["correlation_id"] for record in ours] == ["mine"]


async def test_without_one_each_answer_has_one_of_its_own(http: httpx.AsyncClient) -> None:
    answers = [await http.get("/v1/models"), await http.get("/v1/models"), await http.get("/nothing")]
    made = {answer.headers["x-request-id"] for answer in answers}
    assert len(made) == 3
    assert all(MADE.fullmatch(one) for one in made)


@pytest.mark.parametrize(
    "given",
    ["", "has spaces in it", LONGEST + "x", "tab\there", "gr\xfc\xdfe"],
    ids=lambda given: repr(given)[:24],
)
async def test_one_that_may_not_be_taken_over_is_refused_with_what_may_be(
    world: World, http: httpx.AsyncClient, given: str
) -> None:
    refused = await http.post("/v1/completions", json=BODY, headers={b"X-Request-Id": given.encode("latin-1")})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "X-Request-Id")
    assert f"{len(given)} characters" in error["message"]
    assert "send 1 to 128 visible characters of ASCII, without spaces, or leave it out" in error["message"]
    assert MADE.fullmatch(refused.headers["x-request-id"])
    assert world.metric("accepted_total") == 0


async def test_two_of_them_are_refused(http: httpx.AsyncClient) -> None:
    refused = await http.get("/v1/models", headers=[("X-Request-Id", "a"), ("X-Request-Id", "b")])
    assert refused.status_code == 400
    assert "comes 2 times" in refused.json()["error"]["message"]


async def test_a_probe_is_answered_whatever_it_sends(http: httpx.AsyncClient) -> None:
    for path in ("/health", "/ping"):
        probed = await http.get(path, headers={"X-Request-Id": "has spaces in it"})
        assert probed.status_code == 200
        assert MADE.fullmatch(probed.headers["x-request-id"])


async def test_two_requests_with_one_id_at_a_time_are_two_requests(world: World, http: httpx.AsyncClient) -> None:
    world.pair.stops_after = 2
    headers = {"X-Request-Id": "mine"}
    asking = [asyncio.create_task(http.post("/v1/completions", json=BODY, headers=headers)) for _ in range(2)]
    await world.until(lambda: len(world.prefill.named("start")) == 2, "both run")
    for task in asking:
        task.cancel()
    await asyncio.wait(asking)
    await world.until_idle()
    spans = [span for span in world.spans.get_finished_spans() if span.name == "text_completion bytes"]
    attributes = [dict(span.attributes or {}) for span in spans]
    assert [one["weir.request.client_id"] for one in attributes] == ["mine", "mine"]
    assert len({one["weir.request.id"] for one in attributes}) == 2

"""Keys, lanes, hints and quotas as clients of both frontends meet them."""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc.aio
import httpx
import openai
import pytest
from google.rpc import error_details_pb2, status_pb2
from tests.unit.gateway.fake_scheduler import OPEN_RULES
from tests.unit.gateway.test_access import CLOSED, KEY_A, KEY_B
from tests.unit.gateway.world import FAST, World, open_world

from weir.bus.messages import RefusalReason, SubmitReply
from weir.client import AsyncWeirClient, GenerateOptions, Turn
from weir.core.errors import (
    InvalidRequest,
    Overloaded,
    PermissionDenied,
    QuotaExceeded,
    Unauthenticated,
    Unavailable,
    WeirError,
)
from weir.testing.load import greedy_request

OPTIONS = GenerateOptions(max_tokens=5, temperature=0.0)
BODY = {"model": "bytes", "prompt": "Say hello", "max_tokens": 5, "temperature": 0}


@pytest.fixture
async def closed(world: World) -> World:
    await write(world, CLOSED)
    return world


async def write(world: World, rules: object) -> None:
    changes = world.metric("access_rules_changes_total")
    await world.scheduler.write_rules(rules)  # type: ignore[arg-type]
    await world.until(lambda: world.metric("access_rules_changes_total") > changes, "the rules are known")


@pytest.fixture
async def http(world: World) -> AsyncIterator[httpx.AsyncClient]:
    async with world.http_client() as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def text_of(client: AsyncWeirClient, options: GenerateOptions = OPTIONS) -> str:
    return "".join([chunk.text async for chunk in client.generate("Say hello", options)])


async def refused(world: World, options: GenerateOptions = OPTIONS, api_key: str = "") -> WeirError:
    async with AsyncWeirClient(world.grpc_address, api_key=api_key) as client:
        with pytest.raises(WeirError) as raised:
            await text_of(client, options)
    return raised.value


async def test_a_key_shows_by_grpc_whose_request_it_is(closed: World) -> None:
    async with AsyncWeirClient(closed.grpc_address, api_key=KEY_B) as client:
        assert await text_of(client) == "hello"
    submit = closed.scheduler.submits[-1]
    assert (submit.tenant, submit.lane) == ("b", "standard")
    [start] = closed.prefill.named("start")
    assert start.cache_salt.startswith("tenant:")
    assert closed.metric('tenant_finished_total{tenant="b"}') == 1
    assert closed.metric('tenant_output_tokens_total{tenant="b"}') == 5


async def test_by_grpc_every_call_needs_a_key(closed: World) -> None:
    async with (
        AsyncWeirClient(closed.grpc_address) as nobody,
        AsyncWeirClient(closed.grpc_address, api_key="x") as guess,
    ):
        for client in (nobody, guess):
            for call in (client.list_models(), client.tokenize("hello"), client.cancel("mine"), text_of(client)):
                with pytest.raises(Unauthenticated):
                    await call
            with pytest.raises(Unauthenticated):
                _ = [chunk async for chunk in client.chat([Turn("user", "hello")], OPTIONS)]
    assert closed.scheduler.submits == []
    assert closed.metric("rejected_unauthenticated_total") == 10


async def test_by_http_a_key_comes_in_either_header_and_a_wrong_one_is_401_in_openais_form(
    closed: World, http: httpx.AsyncClient
) -> None:
    for headers, tenant in ((bearer(KEY_A), "a"), ({"X-API-Key": KEY_B}, "b")):
        response = await http.post("/v1/completions", json=BODY, headers=headers)
        assert (response.status_code, closed.scheduler.submits[-1].tenant) == (200, tenant)
    for path, json in (("/v1/completions", BODY), ("/v1/chat/completions", {}), ("/v1/models", None)):
        method = "GET" if json is None else "POST"
        response = await http.request(method, path, json=json, headers=bearer("wrong-key-0123456"))
        assert response.status_code == 401
        assert response.headers["WWW-Authenticate"] == "Bearer"
        body = response.json()["error"]
        assert (body["type"], body["code"]) == ("authentication_error", "invalid_api_key")
        assert "wrong-key" not in response.text
    assert (await http.get("/health")).status_code == 200


async def test_openais_client_raises_its_own_errors(closed: World) -> None:
    async with openai.AsyncOpenAI(base_url=f"{closed.http_url}/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
    async with openai.AsyncOpenAI(base_url=f"{closed.http_url}/v1", api_key=KEY_B, max_retries=0) as client:
        with pytest.raises(openai.PermissionDeniedError, match="not open to tenant 'b'"):
            await client.completions.create(model="bytes", prompt="x", extra_body={"lane": "interactive"})


async def test_the_body_of_somebody_unknown_is_not_read(closed: World, http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", content=b"not json", headers=bearer("wrong-key-0123456"))
    assert response.status_code == 401


async def test_a_change_of_the_rules_counts_for_the_next_request_without_a_restart(world: World) -> None:
    async with AsyncWeirClient(world.grpc_address) as client:
        assert await text_of(client) == "hello"
        await write(world, CLOSED)
        with pytest.raises(Unauthenticated):
            await text_of(client)
        await write(world, OPEN_RULES)
        assert await text_of(client) == "hello"


async def test_malformed_rules_change_nothing_and_are_counted(closed: World) -> None:
    bucket = await closed.scheduler.bus.bucket("weir_test_configuration", durable=True)
    await bucket.put("access", b"\x93nonsense")
    await closed.until(lambda: closed.metric("access_rules_malformed_total") == 1, "it was seen")
    assert isinstance(await refused(closed), Unauthenticated)


async def test_a_gateway_that_has_no_rules_lets_nobody_in_until_they_come() -> None:
    settings = replace(FAST, access_wait_s=0.05)
    async with open_world(settings, rules=None) as world:
        error = await refused(world)
        assert isinstance(error, Unavailable)
        assert error.retry_after_s == 1.0
        await write(world, OPEN_RULES)
        async with AsyncWeirClient(world.grpc_address) as client:
            assert await text_of(client) == "hello"


async def test_keys_are_in_no_log_and_no_span(
    closed: World, http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await http.post("/v1/completions", json=BODY, headers=bearer(KEY_A))
    async with AsyncWeirClient(closed.grpc_address, api_key=KEY_B) as client:
        await text_of(client)
    await http.post("/v1/completions", json=BODY, headers=bearer("wrong-key-0123456"))
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("weir")]
    exported = "\n".join([*ours, *(span.to_json() for span in closed.spans.get_finished_spans())])
    assert '"weir.tenant": "a"' in exported
    for secret in (KEY_A, KEY_B, "wrong-key-0123456"):
        assert secret not in exported


async def test_tenants_neither_see_nor_cancel_each_others_requests(closed: World) -> None:
    closed.pair.stops_after = 2
    mine = GenerateOptions(max_tokens=5, temperature=0.0, request_id="mine")
    async with (
        AsyncWeirClient(closed.grpc_address, api_key=KEY_A) as a,
        AsyncWeirClient(closed.grpc_address, api_key=KEY_B) as b,
    ):
        running = [asyncio.create_task(text_of(client, mine)) for client in (a, b)]
        await closed.until(lambda: len(closed.prefill.named("start")) == 2, "both run under one name")
        assert isinstance(await refused(closed, mine, KEY_A), InvalidRequest)
        assert await a.cancel("mine")
        await closed.until(running[0].done, "a's request is cancelled")
        assert not running[1].done()
        assert await b.cancel("mine")
        await asyncio.wait(running)


async def test_hints_reach_the_scheduler_from_both_frontends(world: World, http: httpx.AsyncClient) -> None:
    hints = {"ttft_target_ms": 200, "itl_target_ms": 40, "expected_output_tokens": 7}
    async with AsyncWeirClient(world.grpc_address) as client:
        await text_of(client, GenerateOptions(max_tokens=5, temperature=0.0, lane="batch", **hints))  # type: ignore[arg-type]
    response = await http.post("/v1/completions", json=BODY | hints | {"priority": 3, "deadline_ms": 30_000})
    assert response.status_code == 200
    by_grpc, by_http = world.scheduler.submits
    for submit in (by_grpc, by_http):
        sent = (submit.ttft_target_ms, submit.itl_target_ms, submit.expected_output_tokens)
        assert sent == (200, 40, 7)
    assert (by_grpc.lane, by_http.lane) == ("batch", "interactive")
    assert 25_000 < by_http.deadline_ms <= 30_000
    assert by_grpc.deadline_ms > 500_000, "the client's own time-out"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ttft_target_ms", 0),
        ("itl_target_ms", 86_400_001),
        ("expected_output_tokens", 0),
        ("expected_output_tokens", 100_000),
        ("deadline_ms", 0),
        ("deadline_ms", 86_400_001),
        ("priority", "high"),
        ("lane", "no such lane!"),
    ],
)
async def test_a_hint_that_cannot_be_is_named(http: httpx.AsyncClient, field: str, value: object) -> None:
    response = await http.post("/v1/completions", json=BODY | {field: value})
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


async def test_a_deadline_by_http_ends_the_request_with_504(world: World, http: httpx.AsyncClient) -> None:
    world.scheduler.grants_at_once = False
    response = await http.post("/v1/completions", json=BODY | {"deadline_ms": 100})
    assert (response.status_code, response.json()["error"]["type"]) == (504, "timeout_error")


async def test_a_lane_that_is_not_open_is_permission_denied_by_grpc(closed: World) -> None:
    error = await refused(closed, GenerateOptions(lane="interactive"), KEY_B)
    assert isinstance(error, PermissionDenied)
    assert closed.metric("rejected_permissiondenied_total") == 1


@pytest.mark.parametrize(
    ("reason", "kind", "status", "error_type", "code"),
    [
        (RefusalReason.QUOTA, QuotaExceeded, 429, "rate_limit_error", "rate_limit_exceeded"),
        (RefusalReason.SHED, Overloaded, 429, "rate_limit_error", "overloaded"),
        (RefusalReason.DEADLINE, Overloaded, 429, "rate_limit_error", "overloaded"),
        (RefusalReason.QUEUE_FULL, Overloaded, 429, "rate_limit_error", "overloaded"),
        (RefusalReason.LANE_FORBIDDEN, PermissionDenied, 403, "permission_error", "permission_denied"),
        (RefusalReason.NO_WORKER, Unavailable, 503, "service_unavailable", "unavailable"),
    ],
)
async def test_a_refusal_of_the_scheduler_names_when_to_come_again(
    world: World,
    http: httpx.AsyncClient,
    reason: RefusalReason,
    kind: type[WeirError],
    status: int,
    error_type: str,
    code: str,
) -> None:
    world.scheduler.refusal = SubmitReply(5, False, reason, "says the scheduler", 2400)
    error = await refused(world)
    assert type(error) is kind
    if isinstance(error, QuotaExceeded):
        assert error.tenant == "default"
    response = await http.post("/v1/completions", json=BODY)
    assert response.status_code == status
    body = response.json()["error"]
    assert (body["type"], body["code"]) == (error_type, code)
    if kind is not PermissionDenied:
        assert error.retry_after_s == 2.4
        assert response.headers["Retry-After"] == "3"
    assert world.metric(f"refused_{reason.value}_total") == 2


async def test_a_quota_failure_names_the_tenant_and_an_overload_is_none(world: World) -> None:
    for reason, is_quota in ((RefusalReason.QUOTA, True), (RefusalReason.QUEUE_FULL, False)):
        world.scheduler.refusal = SubmitReply(5, False, reason, "says the scheduler", 2400)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            _ = [response async for response in world.stub.Generate(greedy_request("x", max_tokens=1))]
        trailers = dict(raised.value.trailing_metadata() or ())
        status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
        quota = error_details_pb2.QuotaFailure()
        subjects = [v.subject for detail in status.details if detail.Unpack(quota) for v in quota.violations]
        assert subjects == (["tenant:default"] if is_quota else [])
        assert any(detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for detail in status.details)

"""Calls for tokens are taken from their tenant's requests a minute, by an account of the gateway's own."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import pytest
from tests.unit.gateway.fake_model import LineTemplate
from tests.unit.gateway.test_access import CLOSED, KEY_A, KEY_B
from tests.unit.gateway.test_dispatches import grant_in_vain
from tests.unit.gateway.test_http_body import busy as thread_taken
from tests.unit.gateway.test_tenants_at_the_frontends import BODY, bearer, write
from tests.unit.gateway.test_tokenize_calls import LONG, busy
from tests.unit.gateway.world import FAST, World, open_world

from weir.bus.configuration import AccessRules, TenantAccess
from weir.bus.messages import Submit
from weir.bus.queue_report import QuotaLevel
from weir.client import AsyncWeirClient
from weir.core.clock import ManualClock
from weir.core.errors import FieldViolation, InvalidRequest, QuotaExceeded
from weir_gateway.requests.quota_book import QuotaBook
from weir_gateway.requests.validation import Limits

MESSAGES = [{"role": "user", "content": "x"}]
CALLS = {
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
    "/v1/messages/count_tokens": {"messages": MESSAGES, "model": "bytes"},
}
LONG_CALLS = {"/tokenize": LONG, "/detokenize": {"tokens": [1] * 600}}


def limited(per_min: float) -> AccessRules:
    """Of tenant a."""
    tenants = tuple(replace(one, requests_per_min=per_min) if one.name == "a" else one for one in CLOSED.tenants)
    return replace(CLOSED, tenants=tenants)


@asynccontextmanager
async def gateway(
    per_min: float = 3,
) -> AsyncIterator[tuple[World, ManualClock, Callable[..., Awaitable[httpx.Response]]]]:
    clock = ManualClock(100.0)
    async with (
        open_world(rules=limited(per_min), clock=clock) as world,
        world.http_client() as http,
    ):

        async def call(path: str = "/tokenize", key: str = KEY_A) -> httpx.Response:
            return await http.post(path, json=CALLS[path], headers=bearer(key))

        yield world, clock, call


@pytest.mark.parametrize("path", CALLS)
async def test_over_the_quota_a_call_is_refused_before_it_is_read_and_told_when_to_come_back(path: str) -> None:
    async with gateway() as (world, clock, call):
        for _ in range(3):
            assert (await call(path)).status_code == 200
        refused = await call(path)
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "20")
        assert refused.headers["X-Weir-Bound"] == "requests_per_min"
        assert "tenant a: over 3 requests a minute, its requests_per_min" in refused.json()["error"]["message"]
        assert (await call(path, KEY_B)).status_code == 200, "another tenant has no such bound"
        async with AsyncWeirClient(world.grpc_address, api_key=KEY_A) as client:
            with pytest.raises(QuotaExceeded, match="tenant a: over 3 requests a minute") as raised:
                await client.tokenize("x")
            assert (raised.value.tenant, raised.value.retry_after_s) == ("a", 20.0)
            clock.advance(20)
            assert await client.tokenize("x") == [120]
        assert (await call(path)).status_code == 429


async def test_what_is_wrong_with_a_call_costs_nothing() -> None:
    async with gateway() as (world, _, call):
        async with world.http_client() as http:
            for _ in range(5):
                assert (await http.post("/tokenize", json={}, headers=bearer(KEY_A))).status_code == 400
        assert (await call()).status_code == 200


async def test_a_call_that_its_template_refuses_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> str:
        raise InvalidRequest([FieldViolation("messages", "are not what it takes")])

    async with gateway() as (_, _, call):
        with monkeypatch.context() as patch:
            patch.setattr(LineTemplate, "render", refuse)
            assert (await call("/v1/messages/count_tokens")).status_code == 400
        assert [(await call()).status_code for _ in range(3)] == [200, 200, 429]


@asynccontextmanager
async def short_of_time() -> AsyncIterator[tuple[World, Callable[..., Awaitable[httpx.Response]]]]:
    """One call for tokens a minute, for which a tenth of a second is all."""
    settings, clock = replace(FAST, limits=Limits(tokenize_timeout_s=0.1)), ManualClock(100.0)
    async with (
        open_world(settings, rules=limited(1), clock=clock, max_context=1024) as world,
        world.http_client(headers=bearer(KEY_A)) as http,
    ):
        yield world, lambda path="/tokenize": http.post(path, json=LONG_CALLS[path])


@pytest.mark.parametrize("path", LONG_CALLS)
async def test_a_call_that_had_no_turn_in_its_time_costs_nothing(path: str) -> None:
    async with short_of_time() as (world, call):
        async with thread_taken(world):
            for _ in range(2):
                assert (await call(path)).status_code == 504
        assert [(await call(path)).status_code for _ in range(2)] == [200, 429]


async def test_a_call_that_was_worked_on_counts_though_it_took_too_long() -> None:
    async with short_of_time() as (world, call):
        with busy(world):
            assert (await call()).status_code == 504
        assert (await call()).status_code == 429


async def test_calls_that_wait_count() -> None:
    async with gateway() as (world, _, call), world.http_client() as http:
        async with thread_taken(world):
            waiting = [asyncio.create_task(http.post("/tokenize", json=LONG, headers=bearer(KEY_A))) for _ in range(3)]
            await world.until(lambda: world.gateway.processor.threads.num_waiting == 3, "they wait")
            assert (await call()).status_code == 429
        assert [one.status_code for one in await asyncio.gather(*waiting)] == [200] * 3
        assert (await call()).status_code == 429


async def test_requests_count_too() -> None:
    async with gateway() as (world, _, call), world.http_client() as http:
        assert (await call()).status_code == 200
        for _ in range(2):
            assert (await http.post("/v1/completions", json=BODY, headers=bearer(KEY_A))).status_code == 200
        assert (await call()).status_code == 429
        assert (await http.post("/v1/completions", json=BODY, headers=bearer(KEY_A))).status_code == 200, (
            "of requests the scheduler decides"
        )


async def test_a_request_that_is_submitted_again_counts_once() -> None:
    async with gateway() as (world, _, call), world.http_client() as http:
        assert (await call()).status_code == 200
        world.scheduler.grants_at_once = False
        asked = asyncio.create_task(http.post("/v1/completions", json=BODY, headers=bearer(KEY_A)))
        again = await grant_in_vain(world)
        assert (await world.scheduler.grant(again)).accepted
        assert (await asked).status_code == 200
        assert [(await call()).status_code for _ in range(2)] == [200, 429]


async def test_what_the_scheduler_says_is_left_counts_too() -> None:
    def left(submit: Submit) -> QuotaLevel:
        return QuotaLevel(3, 1)

    async with gateway() as (world, clock, call), world.http_client() as http:
        world.scheduler.quota_of = left
        assert (await http.post("/v1/completions", json=BODY, headers=bearer(KEY_A))).status_code == 200
        assert [(await call()).status_code for _ in range(2)] == [200, 429]
        clock.advance(60)
        assert (await http.post("/v1/completions", json=BODY, headers=bearer(KEY_A))).status_code == 200
        world.scheduler.quota_of = lambda _: QuotaLevel(3, 0)  # it was at other gateways too
        assert (await http.post("/v1/completions", json=BODY, headers=bearer(KEY_A))).status_code == 200
        refused = await call()
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "20")


async def test_a_quota_that_is_changed_holds_at_once() -> None:
    async with gateway(2) as (world, _, call):
        assert [(await call()).status_code for _ in range(3)] == [200, 200, 429]
        await write(world, limited(4))
        assert [(await call()).status_code for _ in range(3)] == [200, 200, 429]
        await write(world, limited(0))
        assert (await call()).status_code == 200


async def test_without_keys_the_default_tenant_has_its_own() -> None:
    rules = replace(CLOSED, tenants=(TenantAccess("default", requests_per_min=1),))
    async with open_world(rules=rules) as world, world.http_client() as http:
        assert [(await http.post("/tokenize", json={"prompt": "x"})).status_code for _ in range(2)] == [200, 429]


def test_accounts_are_kept_of_those_who_asked_last() -> None:
    book = QuotaBook(ManualClock())
    for number in range(1100):
        book.pay_call(f"t{number}", 1)
    assert (book.call_wait_s("t0", 1), book.call_wait_s("t1099", 1)) == (0.0, 60.0)


def test_less_than_one_a_minute_is_one_in_a_while() -> None:
    clock = ManualClock()
    book = QuotaBook(clock)
    assert book.call_wait_s("a", 0.5) == 0.0
    book.pay_call("a", 0.5)
    assert book.call_wait_s("a", 0.5) == pytest.approx(120)
    book.note("b", QuotaLevel(0.5, 0.0))
    assert book.call_wait_s("b", 0.5) == pytest.approx(60)

"""Quotas in the headers of answers: they go down with use, come back with time, and say which bound is reached."""

import re
from datetime import UTC, datetime

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.gateway.world import World, open_world

from weir.bus.messages import RefusalReason, Submit, SubmitReply
from weir.bus.queue_report import QuotaLevel
from weir.core.clock import Clock, ManualClock
from weir.scheduling.limits import CoreLimits, TenantLimits
from weir.scheduling.tenants import Tenants
from weir_gateway.frontends.rate_limits import duration_text, rate_limit_headers
from weir_gateway.requests.quota_book import Allowance, Quota, QuotaBook

BODY = {"model": "bytes", "prompt": "Say hello", "max_tokens": 5, "temperature": 0}
CHAT = {"model": "bytes", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
OPENAI = "x-ratelimit-"
ANTHROPIC = "anthropic-ratelimit-"


class SlowTenants:
    """A tenant's real account, by a clock of the test's."""

    def __init__(self, limits: TenantLimits) -> None:
        self.clock = ManualClock(100.0)
        self._tenants = Tenants(CoreLimits(default_tenant=limits))

    def pay(self, submit: Submit) -> QuotaLevel | None:
        self._tenants.pay(submit.tenant, submit, self.clock.now_s())
        return self._tenants.try_quota(submit.tenant, self.clock.now_s())


def found(response: httpx.Response, prefix: str) -> dict[str, str]:
    return {name.removeprefix(prefix): value for name, value in response.headers.items() if name.startswith(prefix)}


async def test_headers_go_down_with_use_and_come_back_as_time_passes() -> None:
    tenants = SlowTenants(TenantLimits("default", requests_per_min=6, tokens_per_min=600))
    async with open_world(clock=tenants.clock) as world, world.http_client() as http:
        world.scheduler.quota_of = tenants.pay
        assert found(await http.get("/v1/models"), OPENAI) == {}
        first = found(await http.post("/v1/completions", json=BODY), OPENAI)
        num_tokens = len("Say hello") + 5
        assert (first["limit-requests"], first["remaining-requests"], first["reset-requests"]) == ("6", "5", "10s")
        assert (first["limit-tokens"], first["remaining-tokens"]) == ("600", str(600 - num_tokens))
        assert first["reset-tokens"] == f"{num_tokens / 10:g}s"
        second = found(await http.post("/v1/completions", json=BODY | {"stream": True}), OPENAI)
        assert (second["remaining-requests"], second["reset-requests"]) == ("4", "20s")
        tenants.clock.advance(15)
        refused = await http.post("/v1/completions", json=BODY | {"max_tokens": 10**9})
        assert (refused.status_code, found(refused, OPENAI)["remaining-requests"]) == (400, "5")
        tenants.clock.advance(10)
        third = found(await http.post("/v1/chat/completions", json=CHAT), OPENAI)
        assert (third["remaining-requests"], third["reset-requests"]) == ("5", "10s")
        assert found(await http.get("/v1/models"), OPENAI) == {}, "it costs nothing of the quota"


async def test_without_quotas_there_are_no_such_headers_and_a_quota_that_was_taken_away_is_shown_no_more(
    world: World,
) -> None:
    async with world.http_client() as http:
        assert found(await http.post("/v1/completions", json=BODY), OPENAI) == {}
        world.scheduler.quota_of = lambda _: QuotaLevel(requests_per_min=60, requests_left=3)
        shown = found(await http.post("/v1/completions", json=BODY), OPENAI)
        assert shown.keys() == {"limit-requests", "remaining-requests", "reset-requests"}, "tokens are not bounded"
        world.scheduler.quota_of = lambda _: None
        assert found(await http.post("/v1/completions", json=BODY), OPENAI) == {}


@pytest.mark.parametrize("bound", ["requests_per_min", "tokens_per_min", "max_queued"])
async def test_a_429_says_when_to_come_back_which_bound_is_reached_and_what_is_left(bound: str) -> None:
    quota = QuotaLevel(requests_per_min=60, requests_left=-2, tokens_per_min=6000, tokens_left=10)
    refusal = SubmitReply(5, False, RefusalReason.QUOTA, "over it", 2400, bound, quota)
    async with open_world(clock=ManualClock(100.0)) as world, world.http_client() as http:
        world.scheduler.refusal = refusal
        response = await http.post("/v1/completions", json=BODY)
    assert (response.status_code, response.headers["Retry-After"]) == (429, "3")
    assert response.headers["X-Weir-Bound"] == bound
    headers = found(response, OPENAI)
    assert (headers["remaining-requests"], headers["remaining-tokens"]) == ("0", "10")


async def test_anthropics_route_has_anthropics_names_and_times(world: World) -> None:
    world.scheduler.quota_of = lambda _: QuotaLevel(60, 30, 600, 600)
    body = {"model": "bytes", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    async with world.http_client() as http:
        response = await http.post("/v1/messages", json=body)
    headers = found(response, ANTHROPIC)
    assert (headers["requests-limit"], headers["tokens-limit"], headers["tokens-remaining"]) == ("60", "600", "600")
    left_s = (datetime.fromisoformat(headers["requests-reset"]) - datetime.now(UTC)).total_seconds()
    assert 0 < left_s <= 31
    assert found(response, OPENAI) == {}


def test_anthropics_reset_is_the_moment_when_all_is_there_again() -> None:
    quota = Quota(None, Allowance(per_min=600, left=0, full_in_s=90))
    headers = rate_limit_headers("/v1/messages", quota, lambda: 1_767_225_600)
    assert headers["anthropic-ratelimit-tokens-reset"] == "2026-01-01T00:01:30Z"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.02, "20ms"), (1, "1s"), (8.64, "8.64s"), (59.9999, "1m0s"), (360, "6m0s"), (3602, "1h0m2s")],
)
def test_times_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@given(st.floats(0, 1e6))
def test_a_time_that_is_written_is_the_time_at_most_a_millisecond_late(seconds: float) -> None:
    parts = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
    read_s = sum(
        float(number) * parts[unit] for number, unit in re.findall(r"([\d.]+)(ms|[smh])", duration_text(seconds))
    )
    assert -1e-6 <= read_s - seconds <= 1e-3 + 1e-6


def test_of_many_tenants_those_that_asked_last_are_known() -> None:
    clock: Clock = ManualClock()
    book = QuotaBook(clock)
    for index in range(1100):
        book.note(f"t{index}", QuotaLevel(60, 1))
    assert book.try_quota("t0") is None
    assert book.try_quota("t1099") is not None

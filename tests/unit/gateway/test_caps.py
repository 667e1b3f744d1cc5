"""What one request may ask for is capped by its tenant and its lane, and each refusal says by which."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.gateway.fake_model import MAX_CONTEXT, byte_model
from tests.unit.gateway.fake_scheduler import OPEN_RULES, SCOPE
from tests.unit.gateway.test_tenants_at_the_frontends import refused, text_of, write
from tests.unit.gateway.world import World

from weir.bus.configuration import AccessRules, LaneCaps, TenantAccess
from weir.client import AsyncWeirClient, GenerateOptions
from weir.core.caps import RequestCaps
from weir.core.errors import InvalidRequest
from weir.core.options import GenerateOptions as Options
from weir_gateway.access import AccessControl
from weir_gateway.caps import CapsInForce
from weir_gateway.requests.cap_checks import check_caps
from weir_gateway.requests.client_request import GRPC_NAMES, ClientRequest, Operation, Prompt, Text, TokenIds
from weir_gateway.requests.validation import CheckedRequest, Limits, check_prompt

MODEL, LIMITS = byte_model(), Limits(default_max_tokens=64)
TENANT = RequestCaps(max_n=4, max_top_k=100, max_output_tokens=50, max_sequence_tokens=40)
LANE = RequestCaps(max_n=2, max_output_tokens=80)
CAPS = CapsInForce.of("acme", TENANT, "batch", LANE)
CAPPED = replace(
    OPEN_RULES,
    tenants=(TenantAccess("default", caps=TENANT),),
    lane_caps=(LaneCaps("standard", LANE), LaneCaps("batch", replace(LANE, max_n=1))),
)


HELLO = Text("hello")


def request(prompt: Prompt = HELLO, **options: Any) -> ClientRequest:
    return ClientRequest(Operation.TEXT_COMPLETION, prompt, GRPC_NAMES, Options(**options))


def problems(asked: ClientRequest, caps: CapsInForce = CAPS) -> dict[str, str]:
    try:
        check_caps(asked, caps, MAX_CONTEXT)
    except InvalidRequest as error:
        return {violation.field: violation.description for violation in error.violations}
    return {}


def checked(num_prompt: int, caps: CapsInForce = CAPS, **options: Any) -> CheckedRequest:
    return check_prompt(request(**options), MODEL, LIMITS, [1] * num_prompt, replace(SCOPE, caps=caps))


@pytest.mark.parametrize(
    ("asked", "field", "words"),
    [
        (request(n=3), "options.n", "is 3; lane 'batch' takes at most 2"),
        (request(top_k=101), "options.sampling.top_k", "is 101; tenant 'acme' takes at most 100"),
        (request(top_k=0), "options.sampling.top_k", "is 0, which is all tokens; tenant 'acme' takes at most 100"),
        (request(max_tokens=51), "options.stop_conditions.max_tokens", "is 51; tenant 'acme' takes at most 50"),
        (request(min_tokens=51), "options.stop_conditions.min_tokens", "is 51; tenant 'acme' takes at most 50"),
        (request(max_tokens=40), "options.stop_conditions.max_tokens", "is 40, with a prompt of any length"),
        (
            request(TokenIds((1,) * 40)),
            "token_ids",
            "is 40 tokens; tenant 'acme' takes at most 40 of prompt and output",
        ),
        (request(TokenIds((1,) * 30), max_tokens=11), "options.stop_conditions.max_tokens", "a prompt of 30 tokens"),
    ],
)
def test_what_is_over_a_cap_is_named_before_the_prompt_is_tokenized(
    asked: ClientRequest, field: str, words: str
) -> None:
    found = problems(asked)
    assert list(found) == [field]
    assert words in found[field]


def test_everything_over_its_cap_is_named_at_once_and_nothing_is_without_caps() -> None:
    asked = request(n=9, top_k=0, max_tokens=500)
    assert list(problems(asked)) == ["options.n", "options.sampling.top_k", "options.stop_conditions.max_tokens"]
    assert problems(asked, CapsInForce()) == {}
    assert problems(request(n=2, top_k=100, max_tokens=39)) == {}


def test_what_is_left_out_takes_the_cap() -> None:
    found = checked(num_prompt=10)
    assert (found.stop_rules.max_tokens, found.sampling.top_k) == (30, 100)
    assert (
        checked(5, CapsInForce.of("t", RequestCaps(max_output_tokens=7), "l", RequestCaps())).stop_rules.max_tokens == 7
    )
    free = checked(5, CapsInForce())
    assert (free.stop_rules.max_tokens, free.sampling.top_k) == (64, 0)


def test_a_prompt_that_was_only_known_as_text_is_measured_once_it_is_tokenized() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        checked(num_prompt=40)
    assert refusal.value.violations[0].field == "text"
    with pytest.raises(InvalidRequest, match="a prompt of 35 tokens; tenant 'acme' takes at most 40 tokens"):
        checked(num_prompt=35, max_tokens=6)
    assert checked(num_prompt=35, max_tokens=5).stop_rules.max_tokens == 5


CAP = st.integers(0, 60)
SOME_CAPS = st.builds(RequestCaps, CAP, CAP, CAP, CAP)
MAYBE = st.none() | st.integers(1, 80)


@given(SOME_CAPS, SOME_CAPS, MAYBE, MAYBE, MAYBE, st.integers(1, 80))
def test_whatever_is_let_through_is_within_both_caps(
    tenant: RequestCaps, lane: RequestCaps, n: int | None, top_k: int | None, max_tokens: int | None, num_prompt: int
) -> None:
    caps = CapsInForce.of("t", tenant, "l", lane)
    options: dict[str, Any] = {"n": n, "top_k": top_k, "max_tokens": max_tokens}
    is_good = not problems(request(**options), caps)
    try:
        found = checked(num_prompt, caps, **options)
    except InvalidRequest:
        is_good = False

    def within(value: int, name: str) -> bool:
        return all(not getattr(each, name) or value <= getattr(each, name) for each in (tenant, lane))

    if is_good:
        assert within(n or 1, "max_n")
        assert within(found.stop_rules.max_tokens, "max_output_tokens")
        assert within(num_prompt + found.stop_rules.max_tokens, "max_sequence_tokens")
        assert within(found.sampling.top_k, "max_top_k")
        assert found.sampling.top_k > 0 or not (tenant.max_top_k or lane.max_top_k)
    elif max_tokens is None and top_k is None:
        is_long = not within(num_prompt + 1, "max_sequence_tokens")
        assert is_long or not within(n or 1, "max_n"), "refused for nothing"


def test_the_caps_of_a_request_are_its_tenants_and_its_lanes() -> None:
    access = AccessControl()
    access.update(CAPPED)
    caller = access.identify(None)
    in_batch = access.scope_of(caller, GRPC_NAMES, "batch", None, "").caps
    in_interactive = access.scope_of(caller, GRPC_NAMES, "interactive", None, "").caps
    assert in_batch.n is not None
    assert in_interactive.n is not None
    assert (in_batch.n.value, in_batch.n.owner) == (1, "lane 'batch'")
    assert (in_interactive.n.value, in_interactive.n.owner) == (4, "tenant 'default'")


@pytest.fixture
async def http(world: World) -> AsyncIterator[httpx.AsyncClient]:
    async with world.http_client() as client:
        yield client


async def test_both_apis_refuse_by_the_field_the_client_wrote_and_ask_nobody(
    world: World, http: httpx.AsyncClient
) -> None:
    await write(world, CAPPED)
    by_grpc = await refused(world, GenerateOptions(max_tokens=51))
    assert isinstance(by_grpc, InvalidRequest)
    assert by_grpc.violations[0].field == "options.stop_conditions.max_tokens"
    assert by_grpc.violations[0].description == "is 51; tenant 'default' takes at most 50"
    body = {"model": "bytes", "prompt": "Say hello", "max_tokens": 5, "n": 3, "top_k": 5}
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert "n: is 3; lane 'standard' takes at most 2" in error["message"]
    assert error["param"] == "n"
    assert world.scheduler.submits == []


async def test_a_change_of_the_caps_counts_for_the_next_request(world: World) -> None:
    async with AsyncWeirClient(world.grpc_address) as client:
        for rules, is_good in ((OPEN_RULES, True), (CAPPED, False), (with_output(51), True)):
            if rules is not OPEN_RULES:
                await write(world, rules)
            if is_good:
                text = await text_of(client, GenerateOptions(max_tokens=51, temperature=0.0))
                assert text.startswith("hello")
            else:
                assert isinstance(await refused(world, GenerateOptions(max_tokens=51)), InvalidRequest)


def with_output(max_output_tokens: int) -> AccessRules:
    caps = RequestCaps(max_output_tokens=max_output_tokens)
    return replace(CAPPED, tenants=(TenantAccess("default", caps=caps),), lane_caps=())

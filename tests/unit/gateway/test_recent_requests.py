"""The last requests of a gateway: what is remembered of each, for how long, and who may see it."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.gateway.fake_scheduler import OPEN_RULES
from tests.unit.gateway.test_access import CLOSED, KEY_A, access_of
from tests.unit.gateway.test_tenants_at_the_frontends import bearer, write
from tests.unit.gateway.world import GATEWAY_ID, World

import weir
from weir.bus.messages import Placement, RefusalReason, SubmitReply
from weir.core.clock import ManualClock
from weir.core.credentials import key_digest
from weir.core.errors import NotFound, Overloaded, PermissionDenied, Unauthenticated, Unavailable
from weir.core.life import FinishReason, Phase
from weir.testing.load import greedy_request, stream
from weir.wire.v1 import worker_pb2
from weir_gateway import refusal_pace
from weir_gateway.access import AccessControl
from weir_gateway.frontends.openapi.document import openapi_document
from weir_gateway.recent.store import RecentRequests, RecentSettings, RequestFilter
from weir_gateway.recent.timeline import RequestAbout
from weir_gateway.requests.request_end import RequestEnd
from weir_gateway.requests.request_figures import LaneFigures
from weir_gateway.requests.request_times import RequestTimes

OPERATOR = "key-of-an-operator-0"
GUARDED = replace(CLOSED, admin_key_digests=(key_digest(OPERATOR),), asks_operators=True)
FINISHED = RequestEnd(Phase.FINISHED, finish_reason=FinishReason.STOP)
ABOUT = RequestAbout("id", "", "g", "", "acme", "standard", "bytes", "", "chat", 0, 3, 5, 1000.0, 0.0)
SECRET = "a secret prompt"


def remember(recent: RecentRequests, clock: ManualClock, about: RequestAbout, *, after_s: float = 0.0) -> None:
    """A request that came just now, and ends after so long."""
    came_at_s = clock.now_s()
    times = RequestTimes(LaneFigures(100), clock, came_at_s, "")
    timeline = recent.open(replace(about, came_at_s=came_at_s), times)
    clock.advance(after_s)
    timeline.end(FINISHED)


def ids_of(recent: RecentRequests, **wanted: Any) -> list[str]:
    return [summary.request_id for summary in recent.list_requests(RequestFilter(**wanted)).requests]


@given(st.integers(0, 5), st.integers(0, 20_000), st.lists(st.integers(0, 8), max_size=30))
def test_it_holds_the_last_ones_that_ended_within_both_bounds(
    max_requests: int, max_bytes: int, numbers: list[int]
) -> None:
    clock = ManualClock()
    recent = RecentRequests("g", RecentSettings(max_requests, max_bytes), clock)
    for number in numbers:
        remember(recent, clock, replace(ABOUT, request_id=str(number)))
        assert recent.metrics()["recent_requests"] <= max_requests
        assert recent.metrics()["recent_request_bytes"] <= max_bytes
        assert recent.check_integrity() == []
    newest_first = list(dict.fromkeys(str(number) for number in reversed(numbers)))
    held = ids_of(recent, limit=100)
    assert held == newest_first[: len(held)]
    if max_bytes == 20_000:
        assert len(held) == min(max_requests, len(newest_first))


def test_a_list_is_filtered_and_ordered_as_asked() -> None:
    clock = ManualClock()
    recent = RecentRequests("g", RecentSettings(), clock)
    for request_id, tenant, after_s in (("1", "acme", 2.0), ("2", "other", 5.0), ("3", "acme", 1.0)):
        remember(recent, clock, replace(ABOUT, request_id=request_id, tenant=tenant), after_s=after_s)
    running = replace(ABOUT, request_id="4", came_at_s=clock.now_s(), lane="batch")
    recent.open(running, RequestTimes(LaneFigures(100), clock, clock.now_s(), ""))
    assert ids_of(recent) == ["4", "3", "2", "1"]
    assert ids_of(recent, tenant="acme", life="finished") == ["3", "1"]
    assert ids_of(recent, order="slowest", limit=2) == ["2", "1"]
    assert ids_of(recent, min_ms=2000.0) == ["2", "1"]
    assert ids_of(recent, life="running") == ids_of(recent, lane="batch") == ["4"]


def test_one_is_found_by_its_id_or_the_newest_by_its_clients_name() -> None:
    clock = ManualClock()
    recent = RecentRequests("g", RecentSettings(), clock)
    for request_id in ("1", "2"):
        remember(recent, clock, replace(ABOUT, request_id=request_id, client_id="mine"))
    assert recent.find("1").summary.request_id == "1"
    assert recent.find("mine").summary.request_id == "2"
    with pytest.raises(NotFound, match="'nobody' is not among the 2 that are remembered here"):
        recent.find("nobody")


def test_operators_need_a_key_once_anybody_has_one_and_a_tenants_is_none() -> None:
    open_to_all, guarded = access_of(OPEN_RULES), access_of(GUARDED)
    open_to_all.check_operator(None, is_from_here=True)
    with pytest.raises(PermissionDenied, match="own host"):
        open_to_all.check_operator(None, is_from_here=False)
    guarded.check_operator(OPERATOR, is_from_here=False)
    for key, refusal in ((None, Unauthenticated), (OPERATOR + "x", Unauthenticated), (KEY_A, PermissionDenied)):
        with pytest.raises(refusal):
            guarded.check_operator(key, is_from_here=True)
    with pytest.raises(Unauthenticated):
        access_of(CLOSED).check_operator(None, is_from_here=True)  # of a scheduler that says nothing of operators
    with pytest.raises(Unavailable):
        AccessControl().check_operator(OPERATOR, is_from_here=True)


@pytest.fixture
async def http(world: World) -> AsyncIterator[httpx.AsyncClient]:
    async with world.http_client() as client:
        yield client


def check_form(name: str, value: object) -> None:
    components = openapi_document(weir.__version__)["components"]
    schema = {"$ref": f"#/components/schemas/{name}", "components": components}
    jsonschema.Draft202012Validator(schema).validate(value)


async def test_what_a_gateway_served_is_remembered_with_all_its_phases_and_none_of_its_words(
    world: World, http: httpx.AsyncClient
) -> None:
    body = {"prompt": SECRET, "max_tokens": 5}
    answer = (await http.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"})).json()
    await world.until_idle()
    listed = (await http.get("/debug/requests")).json()
    check_form("RequestList", listed)
    [summary] = listed["requests"]
    found = await http.get(f"/debug/requests/{answer['id']}")
    record = found.json()
    check_form("RequestRecord", record)
    assert record == (await http.get("/debug/requests/mine")).json()
    assert record["summary"] == summary
    assert answer["id"] == f"cmpl-{summary['request_id']}"
    assert (summary["gateway_id"], summary["tenant"], summary["lane"]) == (GATEWAY_ID, "default", "standard")
    assert (summary["life"], summary["finish_reason"], summary["num_dispatches"]) == ("finished", "length", 1)
    usage = answer["usage"]
    assert (summary["num_prompt_tokens"], summary["num_output_tokens"]) == (usage["prompt_tokens"], 5)
    assert summary["num_cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert 0 < summary["time_to_first_token_ms"] <= summary["duration_ms"]
    names = [phase["name"] for phase in record["phases"]]
    assert [name for name in names if name != "hand_off"] == ["tokenize", "queue", "start", "prefill", "decode"]
    assert summary["longest_phase_ms"] == max(phase["duration_ms"] for phase in record["phases"])
    workers = {phase["name"]: phase["worker_id"] for phase in record["phases"]}
    assert (workers["prefill"], workers["decode"]) == (world.prefill.worker_id, world.decode.worker_id)
    assert SECRET not in found.text
    assert answer["choices"][0]["text"] not in found.text


async def test_answers_to_one_prompt_are_remembered_each_and_a_refused_one_with_its_error(
    world: World, http: httpx.AsyncClient
) -> None:
    await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2, "n": 3})
    world.scheduler.refusal = SubmitReply(5, False, RefusalReason.QUEUE_FULL, "full", 1000)
    await stream(world.stub, greedy_request("x", max_tokens=2, request_id="refused"))
    await world.until_idle()
    record = (await http.get("/debug/requests/refused")).json()
    assert (record["summary"]["life"], record["summary"]["error_type"]) == ("refused", "Overloaded")
    assert record["summary"]["time_to_first_token_ms"] is None
    listed = (await http.get("/debug/requests", params={"life": "finished"})).json()
    assert sorted(summary["choice"] for summary in listed["requests"]) == [0, 1, 2]
    assert listed["num_held"] == 4


async def test_what_is_asked_wrongly_is_named(http: httpx.AsyncClient) -> None:
    for query, field in (({"limit": 0}, "limit"), ({"order": "x"}, "order"), ({"tenants": "a"}, "tenants")):
        refused = await http.get("/debug/requests", params=query)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    missing = await http.get("/debug/requests/nothing")
    assert (missing.status_code, "nothing" in missing.json()["error"]["message"]) == (404, True)


async def test_with_keys_in_force_operators_alone_see_it(world: World, http: httpx.AsyncClient) -> None:
    await write(world, GUARDED)
    for path in ("/debug/requests", "/debug/requests/nothing"):
        assert (await http.get(path)).status_code == 401
        assert (await http.get(path, headers=bearer(KEY_A))).status_code == 403
    assert (await http.get("/debug/requests", headers=bearer(OPERATOR))).status_code == 200
    # an operator's key is nobody's who may ask a model
    assert (await http.get("/v1/models", headers=bearer(OPERATOR))).status_code == 401


async def test_an_operator_is_answered_at_once_however_many_strangers_are_refused(
    world: World, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusal_pace, "_PER_S", 0.001)
    monkeypatch.setattr(refusal_pace, "_MAX_WAIT_S", 60.0)
    await write(world, GUARDED)
    for _ in range(20):
        assert (await http.get("/debug/requests")).status_code == 401
    missing = http.get("/debug/requests/nothing", headers=bearer(OPERATOR))
    assert (await asyncio.wait_for(missing, timeout=30)).status_code == 404


async def test_what_its_worker_waited_for_and_who_went_on_explains_a_phase() -> None:
    clock = ManualClock()
    recent = RecentRequests("g", RecentSettings(), clock)
    times = RequestTimes(LaneFigures(100), clock, 0.0, "")
    timeline = recent.open(ABOUT, times)
    split, local = Placement(1, "p", "p:1", "d", "d:1", 4), Placement(2, "d", "d:1", "d", "d:1", 4)
    for phase in (Phase.QUEUED, Phase.GRANTED, Phase.PREFILLING, Phase.HANDING_OFF, Phase.DECODING):
        timeline.on_phase(phase, split)
    clock.advance(1.0)
    timeline.adopted(Overloaded("its worker is gone"), 3, 0.9)
    moved = recent.find("id")
    assert (moved.summary.num_moves, moved.summary.cause) == (1, "moving to another worker")
    assert [(event.name, event.num_output_tokens) for event in moved.events] == [("adopted", 3)]
    for phase in (Phase.QUEUED, Phase.GRANTED, Phase.PREFILLING, Phase.HANDING_OFF):
        timeline.on_phase(phase, local)
    clock.advance(5.0)
    timeline.on_phase(Phase.DECODING, local)
    clock.advance(4.0)
    timeline.on_waits(worker_pb2.SequenceWaits(waiting_us=4_900_000, swapped_out_us=3_000_000, num_preemptions=2))
    timeline.end(FINISHED)
    phases = {(phase.name, phase.dispatch): phase for phase in recent.find("id").phases}
    assert phases["prefill", 2].cause == "waiting for a place in a step", "one worker does all of it"
    assert phases["decode", 2].cause == "swapped out for others"
    assert phases["decode", 1].cause == "moving to another worker"
    assert ("hand_off", 2) not in phases
    summary = recent.find("id").summary
    assert (summary.num_dispatches, summary.num_preemptions, summary.longest_phase) == (2, 2, "prefill")


@pytest.mark.parametrize("name", ["Forwarded", "X-Forwarded-For", "X-Real-IP", "Via"])
async def test_who_asks_through_a_proxy_on_this_host_is_not_taken_for_somebody_here(
    http: httpx.AsyncClient, name: str
) -> None:
    assert (await http.get("/debug/requests")).status_code == 200
    refused = await http.get("/debug/requests", headers={name: "203.0.113.7"})
    assert refused.status_code == 403
    assert "on the gateway's own host alone" in refused.json()["error"]["message"]

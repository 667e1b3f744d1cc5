"""Fields that a body does not declare: slips are named, neutral values pass, the rest is ignored in the open."""

from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest
from tests.unit.gateway.world import FAST, World, open_world

from weir.core.errors import FieldViolation
from weir_gateway.frontends.bodies.unknown_fields import KnownFields, check_undeclared, ignored_header
from weir_gateway.frontends.openai.schema import CHAT_FIELDS, COMPLETION_FIELDS

KNOWN = KnownFields(
    frozenset({"max_tokens", "stop", "n"}), {"audio": (), "best_of": (1,), "beam": (False,)}, {"audio": "is loud"}
)


@pytest.fixture
async def http(world: World) -> AsyncIterator[httpx.AsyncClient]:
    async with world.http_client() as client:
        yield client


def refused(extra: dict[str, object], known: KnownFields = KNOWN) -> list[tuple[str, str]]:
    violations: list[FieldViolation] = []
    check_undeclared(extra, known, "ignore", violations)
    return [(violation.field, violation.description) for violation in violations]


@pytest.mark.parametrize("name", ["max_token", "maxTokens", "max-tokens", "max_tokns", "mxa_tokens", "MAX_TOKENS"])
def test_a_slip_of_the_pen_is_told_what_was_meant(name: str) -> None:
    assert refused({name: 1}) == [(name, "is not a field of this request; 'max_tokens' is one")]


@pytest.mark.parametrize(
    "name", ["session_id", "user_id", "conversation_id", "trace_id", "tags", "timeout", "title", "variables", "id", "x"]
)
def test_what_is_near_nothing_is_no_slip(name: str) -> None:
    for known in (CHAT_FIELDS, COMPLETION_FIELDS):
        assert refused({name: 1}, known) == []


def test_a_relative_of_what_is_not_served_is_no_slip() -> None:
    for name in ("mirostat_tau", "mirostat_eta", "typical", "min_keep", "stream_reasoning"):
        assert refused({name: 1}, CHAT_FIELDS) == []
    assert refused({"bestOf": 1}) == [("bestOf", "is not a field of this request; 'best_of' is one")]


def test_a_field_that_is_not_served_passes_with_the_values_that_change_nothing() -> None:
    assert refused({"audio": None, "best_of": 1, "beam": False}) == []
    assert refused({"audio": {}}) == [("audio", "is loud; leave it out")]
    assert refused({"best_of": 2}) == [("best_of", "is not served; leave it out")]


def test_true_is_not_one() -> None:
    assert [field for field, _ in refused({"best_of": True, "beam": 0})] == ["best_of", "beam"]


def test_very_many_fields_are_refused_at_once() -> None:
    assert refused({f"x{index}": 1 for index in range(33)})[0][0] == "body"


def test_what_is_ignored_is_named_in_a_header_that_any_name_fits_into() -> None:
    assert ignored_header(["a", "b-c_d.e"]) == "a, b-c_d.e"
    assert ignored_header(["é\r\nx: y", "a,b"]) == "%C3%A9%0D%0Ax%3A%20y, a%2Cb"
    many = ignored_header([f"x{index}" for index in range(20)])
    assert many.startswith("x0, x1, ")
    assert many.endswith("x15, and 4 more")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_says_what_it_has_ignored(http: httpx.AsyncClient, path: str, stream: bool) -> None:
    body = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    answer = await http.post(path, json={**body, "stream": stream, "session_id": "s", "rôle": 1, "trace_id": None})
    assert answer.status_code == 200
    assert answer.headers["x-weir-ignored-fields"] == "session_id, r%C3%B4le"
    assert "x-weir-ignored-fields" not in (await http.post(path, json={**body, "user": "me"})).headers


async def test_a_setting_refuses_them() -> None:
    settings = replace(FAST, http=replace(FAST.http, unknown_fields="refuse"))
    async with open_world(settings) as world, world.http_client() as http:
        answer = await http.post("/v1/completions", json={"prompt": "x", "session_id": "s"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "session_id")


@pytest.mark.parametrize("known", [CHAT_FIELDS, COMPLETION_FIELDS], ids=["chat", "completion"])
def test_each_field_is_in_one_table(known: KnownFields) -> None:
    assert not known.declared & known.neutral.keys()
    assert not known.declared & known.ignored
    assert not known.ignored & known.neutral.keys()
    assert known.reasons.keys() <= known.neutral.keys() | known.declared


async def test_what_common_clients_send_by_themselves_is_taken(http: httpx.AsyncClient) -> None:
    """guidellm, vLLM's benchmark, LangChain, LiteLLM, llama.cpp's: with the values that they have by default."""
    body = {
        "prompt": "x",
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "length_penalty": 1.0,
        "use_beam_search": False,
        "repetition_penalty": 1.0,
        "add_special_tokens": True,
        "repeat_penalty": 1,
        "mirostat": 0,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "stream_options": None,
        "prompt_cache_retention": "24h",
        "verbosity": "medium",
    }
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert "x-weir-ignored-fields" not in answer.headers


async def test_tools_that_may_not_be_called_change_nothing(http: httpx.AsyncClient) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}
    assert (await http.post("/v1/chat/completions", json={**chat, "tool_choice": "none"})).status_code == 200
    answer = await http.post("/v1/chat/completions", json=chat)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools[0]")


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("extra", [{"resume_from": 3}, {"resume_from": "x"}, {"n": 1.0}], ids=str)
async def test_what_a_body_does_not_declare_is_none_of_its_options(
    http: httpx.AsyncClient, path: str, extra: dict[str, object]
) -> None:
    bodies: dict[str, dict[str, object]] = {
        "/v1/responses": {"input": "x"},
        "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5},
    }
    answer = await http.post(path, json={**bodies[path], **extra}, headers={"Idempotency-Key": "k"})
    assert answer.status_code == 200, answer.text
    assert "hello" in answer.text


async def test_counting_tokens_takes_what_the_same_message_takes(http: httpx.AsyncClient) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "stop_sequences": ["a"], "session_id": 1}
    answer = await http.post("/v1/messages/count_tokens", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-weir-ignored-fields"] == "session_id"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": ["a"] * 5000}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 5000}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{}] * 5000}]}, "messages[0].content"),
        ("/v1/responses", {"input": [{}] * 5000}, "input"),
    ],
    ids=["prompts", "messages", "parts", "items"],
)
async def test_a_list_that_is_far_too_long_is_not_read(
    http: httpx.AsyncClient, path: str, body: dict[str, object], param: str
) -> None:
    error = (await http.post(path, json=body)).json()["error"]
    assert (error["param"], "has 5000 entries; at most 4096 are read" in error["message"]) == (param, True)

"""What tools ask for: tokens, one model, the version, the load, and whether the gateway serves."""

import asyncio
import reprlib
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from tests.unit.gateway.fake_model import EOS, MAX_CONTEXT, ids_of
from tests.unit.gateway.test_access import CLOSED, KEY_A
from tests.unit.gateway.test_tenants_at_the_frontends import bearer, write
from tests.unit.gateway.world import World, open_world

import weir
from weir.testing.load import greedy_request
from weir_gateway.frontends.http_frontend import HttpFrontend
from weir_gateway.frontends.http_server import HttpSettings

OPEN_PATHS = {"/health", "/ping", "/openapi.json", "/docs"}
CHAT = [{"role": "developer", "content": "Hi"}, {"role": "user", "content": [{"type": "text", "text": "yo"}]}]


@pytest.fixture
async def http(world: World) -> AsyncIterator[httpx.AsyncClient]:
    async with world.http_client(timeout=60) as client:
        yield client


async def test_every_route_but_those_of_probes_asks_for_a_key(world: World, http: httpx.AsyncClient) -> None:
    await write(world, CLOSED)
    app = HttpFrontend(world.gateway.processor, HttpSettings(), lambda: True, world.bodies).make_app()
    paths = [(method, route.path) for route in app.routes for method in route.methods]  # type: ignore[attr-defined]
    assert len({path for _, path in paths}) >= 10
    for method, path in paths:
        asked = path.replace("{model:path}", "bytes")
        refused = await http.request(method, asked, content=b"not json", headers=bearer("wrong-key-0123456"))
        assert refused.status_code == (200 if path in OPEN_PATHS else 401), (method, path)


async def test_a_key_in_force_opens_them(world: World, http: httpx.AsyncClient) -> None:
    await write(world, CLOSED)
    for path in ("/version", "/load", "/v1/models/bytes"):
        assert (await http.get(path, headers=bearer(KEY_A))).status_code == 200
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [120]})):
        assert (await http.post(path, json=body, headers=bearer(KEY_A))).status_code == 200


async def test_the_version_is_the_librarys(http: httpx.AsyncClient) -> None:
    assert (await http.get("/version")).json() == {"version": weir.__version__}


async def test_a_ping_is_answered_with_nothing_while_the_gateway_serves(world: World, http: httpx.AsyncClient) -> None:
    for method in ("GET", "POST"):
        ping = await http.request(method, "/ping")
        assert (ping.status_code, ping.content) == (200, b"")
    await world.gateway.drain(0)
    for method in ("GET", "POST"):
        ping = await http.request(method, "/ping")
        assert (ping.status_code, ping.content) == (503, b"")


async def test_the_load_is_the_requests_of_both_ports_that_have_not_ended(
    world: World, http: httpx.AsyncClient
) -> None:
    async def load() -> Any:
        return (await http.get("/load")).json()

    assert await load() == {"server_load": 0}
    world.pair.stops_after = 2
    body = {"prompt": "x", "n": 3, "temperature": 1}
    by_http = asyncio.create_task(http.post("/v1/completions", json=body))
    by_grpc = world.stub.Generate(greedy_request("x", max_tokens=5))
    await world.until(lambda: len(world.prefill.named("start")) == 4, "all answers are being computed")
    assert await load() == {"server_load": 2}, "three answers to one request are one request"
    by_grpc.cancel()
    await world.until(lambda: world.gateway.processor.num_open == 1, "the call is over")
    by_http.cancel()
    await asyncio.wait([by_http])
    await world.until_idle()
    refused = await http.post("/v1/completions", json={"prompt": ""})
    assert refused.status_code == 400
    assert await load() == {"server_load": 0}


async def test_one_model_is_shown_as_in_the_list(world: World, http: httpx.AsyncClient) -> None:
    shown = {"id": "bytes", "object": "model", "created": 0, "owned_by": "weir", "max_model_len": MAX_CONTEXT}
    expected = {**shown, "root": "bytes", "parent": None, "permission": []}
    assert (await http.get("/v1/models")).json() == {"object": "list", "data": [expected]}
    assert (await http.get("/v1/models/")).json() == {"object": "list", "data": [expected]}
    assert (await http.get("/v1/models/bytes")).json() == expected
    async with openai.AsyncOpenAI(base_url=f"{world.http_url}/v1", api_key="none", max_retries=0) as client:
        assert (await client.models.retrieve("bytes")).id == "bytes"
        with pytest.raises(openai.NotFoundError, match="'org/other' is not served here; one of bytes is") as raised:
            await client.models.retrieve("org/other")
    assert (raised.value.type, raised.value.param) == ("not_found_error", "model")


async def test_a_text_becomes_tokens(world: World, http: httpx.AsyncClient) -> None:
    answer = await http.post("/tokenize", json={"model": "bytes", "prompt": "hé"})
    assert answer.headers["content-type"] == "application/json"
    ids = ids_of("hé")
    assert answer.json() == {"count": 3, "max_model_len": MAX_CONTEXT, "tokens": ids, "token_strs": None}
    body = {"prompt": "hé", "return_token_strs": True, "add_special_tokens": False, "user": "me"}
    spelled = await http.post("/tokenize", json=body)
    assert spelled.json()["token_strs"] == [f"<{token_id}>" for token_id in ids]
    assert world.tokenizer.encoded_with_special == [True, False]


async def test_nothing_becomes_no_tokens_and_no_tokens_nothing(http: httpx.AsyncClient) -> None:
    answer = await http.post("/tokenize", json={"prompt": "", "return_token_strs": True})
    assert answer.json() == {"count": 0, "max_model_len": MAX_CONTEXT, "tokens": [], "token_strs": []}
    assert (await http.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


async def test_a_conversation_becomes_the_tokens_that_a_chat_would_have(world: World, http: httpx.AsyncClient) -> None:
    answer = (await http.post("/tokenize", json={"messages": CHAT})).json()
    await http.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 1})
    [start] = world.prefill.named("start")
    assert answer["tokens"] == list(start.prompt_token_ids) == ids_of("system: Hi\nuser: yo\n")
    assert answer["count"] == len(answer["tokens"])
    without = (await http.post("/tokenize", json={"messages": CHAT, "add_generation_prompt": False})).json()
    assert without["tokens"] == [*answer["tokens"], *ids_of(".")]
    await http.post("/tokenize", json={"messages": CHAT, "add_special_tokens": True})
    assert world.tokenizer.encoded_with_special == [False, False, False, True]


async def test_tokens_become_their_text_special_ones_too(http: httpx.AsyncClient) -> None:
    answer = await http.post("/detokenize", json={"model": "bytes", "tokens": [*ids_of("hé"), EOS]})
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {"prompt": "hé<end>"}


async def test_a_text_beyond_the_context_is_counted_all_the_same(http: httpx.AsyncClient) -> None:
    text = "0123456789" * 10_000
    answer = (await http.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    assert answer["count"] == len(text)
    assert answer["tokens"] == ids_of(text), "in order, wherever the answer was cut while it was made"
    assert answer["token_strs"] == [f"<{token_id}>" for token_id in ids_of(text)]


async def test_what_is_long_is_done_beside_the_event_loop(world: World, http: httpx.AsyncClient) -> None:
    await http.post("/tokenize", json={"prompt": "x" * 5000})
    await http.post("/tokenize", json={"messages": [{"role": "user", "content": "x" * 2500}] * 2})
    # the template makes a long text of turns in which nothing is
    await http.post("/tokenize", json={"messages": [{"role": "user", "content": ""}] * 1024})
    assert world.tokenizer.num_encoded == 3
    assert all(name.startswith("prompts") for name in world.tokenizer.thread_names)


async def test_many_tokens_become_text_beside_the_event_loop() -> None:
    async with open_world(max_context=1024) as world, world.http_client(timeout=60) as http:
        assert (await http.post("/detokenize", json={"tokens": [120] * 512})).status_code == 200
        assert world.tokenizer.thread_names == {threading.main_thread().name}, "few of them"
        assert (await http.post("/detokenize", json={"tokens": [120] * 513})).json() == {"prompt": "x" * 513}
        [other] = world.tokenizer.thread_names - {threading.main_thread().name}
        assert other.startswith("prompts")


MANY = [{"role": "user", "content": "x"}] * 1025


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("/tokenize", {}, "prompt", "is missing; give it, or messages"),
        ("/tokenize", {"prompt": None, "messages": None}, "prompt", "is missing"),
        ("/tokenize", {"prompt": "x", "messages": CHAT}, "prompt", "comes with messages; give one of them"),
        ("/tokenize", {"prompt": 5}, "prompt", "must be one text"),
        ("/tokenize", {"prompt": [1, 2]}, "prompt", "must be one text"),
        ("/tokenize", {"prompt": "x" * (2**20 + 1)}, "prompt", "is 1048577 bytes; at most 1048576"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": "yes"}, "add_special_tokens", "boolean"),
        ("/tokenize", {"prompt": "x", "return_token_strs": 1}, "return_token_strs", "boolean"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt", "is for messages"),
        ("/tokenize", {"prompt": "x", "model": 5}, "model", "string"),
        ("/tokenize", {"prompt": "x", "promt": "y"}, "promt", "is not a field of this request"),
        ("/tokenize", {"messages": CHAT, "continue_final_message": True}, "continue_final_message", "not served"),
        ("/tokenize", {"messages": CHAT, "continue_final_message": 0}, "continue_final_message", "not served"),
        ("/tokenize", {"messages": CHAT, "chat_template": "x"}, "chat_template", "not served"),
        ("/tokenize", {"messages": CHAT, "tools": [{}]}, "tools[0]", "no other kind is served"),
        ("/tokenize", {"prompt": "x", "tools": [{}]}, "tools", "is for messages"),
        ("/tokenize", {"messages": []}, "messages", "has 0 turns; give from 1 to 1024"),
        ("/tokenize", {"messages": MANY}, "messages", "has 1025 turns; give from 1 to 1024"),
        ("/tokenize", {"messages": "hello"}, "messages", "valid array"),
        ("/tokenize", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "'user'"),
        ("/tokenize", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "must be a text"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 2**20 + "x"}]}, "messages", "1048577 bytes"),
        ("/detokenize", {}, "tokens", "must be one list of token ids"),
        ("/detokenize", {"tokens": "104"}, "tokens", "must be one list of token ids"),
        ("/detokenize", {"tokens": [1, 2.5]}, "tokens", "must be one list of token ids"),
        ("/detokenize", {"tokens": [True]}, "tokens", "must be one list of token ids"),
        ("/detokenize", {"tokens": [[1]]}, "tokens", "must be one list of token ids"),
        ("/detokenize", {"tokens": [5, -1]}, "tokens", "[1] is -1; must be from 0 to 256, the vocabulary of bytes"),
        ("/detokenize", {"tokens": [257]}, "tokens", "[0] is 257; must be from 0 to 256"),
        ("/detokenize", {"tokens": [10**30]}, "tokens", "must be from 0 to 256"),
        ("/detokenize", {"tokens": [1] * (MAX_CONTEXT + 1)}, "tokens", "is 513 tokens; at most 512"),
        ("/detokenize", {"tokens": [1] * 500_000}, "tokens", "is 500000 tokens; at most 512"),
        ("/detokenize", {"tokens": [1] * 2_000_000}, "body", "has more than 1114112 values; send less at once"),
        ("/detokenize", {"tokens": [1], "prompt": "x"}, "prompt", "is not a field of this request"),
    ],
    ids=reprlib.repr,  # not all of two million numbers
)
async def test_what_is_wrong_is_named(
    world: World, http: httpx.AsyncClient, path: str, body: dict[str, Any], param: str, says: str
) -> None:
    refused = await http.post(path, json=body)
    assert refused.status_code == 400, refused.text[:200]
    error = refused.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert says in error["message"]


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})])
async def test_an_unknown_model_is_named(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    refused = await http.post(path, json=body | {"model": "gpt-x"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (404, "model")


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[]", b"nan", b'{"a":' * 5000, b'{"prompt": "\\ud800"}'])
async def test_bytes_that_are_no_request_are_refused(http: httpx.AsyncClient, path: str, body: bytes) -> None:
    refused = await http.post(path, content=body)
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_a_body_over_the_limit_is_refused(http: httpx.AsyncClient) -> None:
    for path in ("/tokenize", "/detokenize"):
        assert (await http.post(path, content=b"x" * (32 * 2**20 + 1))).status_code == 413

"""One tenant holds all that it can get, or sends what takes long; another one is served meanwhile."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import grpc.aio
import httpx
import pytest
from tests.unit.gateway.fake_model import ByteTokenizer, LineTemplate, byte_model
from tests.unit.gateway.test_access import CLOSED, KEY_A, KEY_B
from tests.unit.gateway.test_tenants_at_the_frontends import BODY, bearer, text_of
from tests.unit.gateway.world import FAST, World, open_world

from weir.client import AsyncWeirClient
from weir.core.errors import QuotaExceeded
from weir.rpc.errors import from_rpc_error
from weir.rpc.port_guard import PortLimits
from weir_gateway import refusal_pace
from weir_gateway.frontends.openai.schema import parse_body

SERVED_WITHIN_S = 10.0
"""Below what any attack here lasts, and far above what a busy machine adds."""
GATEWAY: Any = {"rules": CLOSED, "port_limits": PortLimits(max_message_bytes=1 << 20, max_calls=256)}


async def check_served(world: World, http: httpx.AsyncClient) -> None:
    """b gets an answer by gRPC, one by HTTP, and tokens, while what is done to the gateway lasts."""
    async with asyncio.timeout(SERVED_WITHIN_S):
        async with AsyncWeirClient(world.grpc_address, api_key=KEY_B) as client:
            assert await text_of(client) == "hello"
        for path, body in (("/v1/completions", BODY), ("/tokenize", {"prompt": "x" * 3000})):
            response = await http.post(path, json=body, headers=bearer(KEY_B))
            assert response.status_code == 200, response.text


@asynccontextmanager
async def half_sent_messages(world: World, num: int) -> AsyncIterator[list["asyncio.Task[None]"]]:
    """By a, over gRPC."""
    never = asyncio.Event()

    async def message() -> AsyncIterator[bytes]:
        await never.wait()
        yield b""

    async def call(channel: grpc.aio.Channel) -> None:
        stub: Any = channel.stream_stream("/weir.v1.Inference/Generate")
        async for _ in stub(message(), metadata=(("x-api-key", KEY_A),)):
            pass

    async with grpc.aio.insecure_channel(world.grpc_address) as channel:
        calls = [asyncio.create_task(call(channel)) for _ in range(num)]
        yield calls
        for one in calls:
            one.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


@asynccontextmanager
async def half_sent_bodies(world: World, num: int, num_bytes: int) -> AsyncIterator[list["asyncio.Task[bytes]"]]:
    """By a, over HTTP. Of each what is answered, if anything is."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-API-Key: {KEY_A}\r\nContent-Length: 4000000\r\n\r\n"
    writers, answers = [], []
    for _ in range(num):
        reader, writer = await asyncio.open_connection("127.0.0.1", world.gateway.http_port)
        writer.write(head.encode() + b" " * num_bytes)
        writers.append(writer)
        answers.append(asyncio.create_task(reader.read(4000)))
    try:
        yield answers
    finally:
        for writer in writers:
            writer.close()
        await asyncio.gather(*answers, return_exceptions=True)


async def test_messages_and_bodies_that_never_end_keep_no_other_tenant_waiting() -> None:
    async with (
        open_world(**GATEWAY, max_bodies_bytes=32 << 20) as world,
        world.http_client(timeout=60) as http,
        half_sent_messages(world, 64) as calls,
        half_sent_bodies(world, 64, 500_000) as bodies,
    ):
        await world.until(lambda: sum(call.done() for call in calls) > 30, "the share is taken")
        assert world.bodies.num_bytes > 20 << 20
        for _ in range(3):
            await check_served(world, http)
        refused = from_rpc_error(next(call for call in calls if call.done()).exception())  # type: ignore[arg-type]
        assert isinstance(refused, QuotaExceeded)
        assert refused.tenant == "a"
        assert (
            "of the 33554432 bytes for bodies that are read at once, which is its share of them; try" in refused.message
        )
        answer = next(body for body in bodies if body.done()).result()
        assert answer.startswith(b"HTTP/1.1 429")
        assert b"x-weir-bound: tenant_share" in answer.lower()


async def test_of_the_bodies_that_are_read_at_once_a_tenant_has_its_share() -> None:
    settings = replace(FAST, http=replace(FAST.http, max_connections=40))
    async with (
        open_world(settings, **GATEWAY) as world,
        world.http_client(timeout=60) as http,
    ):
        async with half_sent_bodies(world, 20, 1) as bodies:
            await world.until(lambda: sum(body.done() for body in bodies) == 4, "16 of 20 are being read")
            for body in bodies:
                if body.done():
                    assert (
                        b"tenant a: it has 16 of the 20 places for bodies that this port reads at once" in body.result()
                    )
            await check_served(world, http)
        for _ in range(20):  # of those that have gone nothing is left
            assert (await http.post("/v1/completions", json=BODY, headers=bearer(KEY_A))).status_code == 200


class Attacker(NamedTuple):
    tenant: str = "a"
    has_peers: bool = True


async def test_long_bodies_come_no_faster_than_the_share_of_a_core_of_their_tenant() -> None:
    long = {**BODY, "user": "u" * 2_000_000}
    settings = replace(FAST, http=replace(FAST.http, body_timeout_s=1.0))
    async with open_world(settings, **GATEWAY) as world, world.http_client(timeout=60) as http:
        await check_served(world, http)
        world.gateway.processor.threads.charge(Attacker(), 100.0)
        posting = asyncio.create_task(http.post("/v1/completions", json=long, headers=bearer(KEY_A)))
        short = http.post("/v1/completions", json=BODY, headers=bearer(KEY_A))
        for answer in (await http.post("/v1/completions", json=long, headers=bearer(KEY_B)), await short):
            assert answer.status_code == 200
        await asyncio.sleep(0.2)
        assert not posting.done()
        assert 0 < world.bodies.num_bytes < 1_000_000, "nothing more of a's is read"
        answer = await posting
        assert (answer.status_code, answer.headers["x-weir-bound"]) == (429, "tenant_share")


async def test_tenants_that_send_tokens_alone_are_among_those_for_whom_others_wait() -> None:
    async with open_world(**GATEWAY) as world, world.http_client(timeout=60) as http:
        threads = world.gateway.processor.threads
        threads.charge(Attacker(), 100.0)
        assert not threads.has_had_its_share(Attacker()), "nobody else has asked"
        body = {"prompt": [5, 6], "max_tokens": 1}
        assert (await http.post("/v1/completions", json=body, headers=bearer(KEY_B))).status_code == 200
        threads.charge(Attacker(), 100.0)
        assert threads.has_had_its_share(Attacker())


class StuckTokenizer(ByteTokenizer):
    """Comes to no end with what is very long, until it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = threading.Event()
        self.num_stuck = 0

    def encode(self, text: str, *, add_bos: bool = True, field: str = "prompt") -> list[int]:
        if len(text) > 100_000:
            self.num_stuck += 1
            assert self.may_end.wait(20)
        return super().encode(text, add_bos=add_bos, field=field)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
async def test_long_prompts_in_a_row_keep_no_other_tenant_waiting(path: str) -> None:
    tokenizer = StuckTokenizer()
    long = "x" * 500_000
    body = {"messages": [{"role": "user", "content": long}]} if "chat" in path else {"prompt": long}
    async with (
        open_world(**GATEWAY, model=byte_model(tokenizer, max_context=100_000)) as world,
        world.http_client(timeout=60) as http,
    ):
        sent = [asyncio.create_task(http.post(path, json=body, headers=bearer(KEY_A))) for _ in range(6)]
        await world.until(
            lambda: tokenizer.num_stuck == 1 and world.gateway.processor.threads.num_waiting == 5, "stuck"
        )
        await check_served(world, http)
        assert tokenizer.num_stuck == 1, "of a tenant one is done at a time"
        tokenizer.may_end.set()
        expected = 200 if path == "/tokenize" else 400  # more tokens than a sequence has
        assert {answer.status_code for answer in await asyncio.gather(*sent)} == {expected}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_of_a_prompt_that_is_far_too_long_the_beginning_alone_is_made_tokens(path: str) -> None:
    tokenizer = StuckTokenizer()
    long = "x" * 500_000
    body = {"messages": [{"role": "user", "content": long}]} if "chat" in path else {"prompt": long}
    async with (
        open_world(**GATEWAY, model=byte_model(tokenizer, max_context=4096)) as world,
        world.http_client(timeout=60) as http,
    ):
        answer = await http.post(path, json=body, headers=bearer(KEY_A))
        assert (answer.status_code, tokenizer.num_stuck) == (400, 0)
        assert "is more than 4096 tokens" in answer.text


@pytest.mark.parametrize("body", [{"prompt": "x" * 100_000}, {"prompt": "x", "y": [[]] * 40_000}])
async def test_what_is_long_and_refused_counts_more_of_its_tenants_share_than_it_took(body: dict[str, Any]) -> None:
    async with (
        open_world(**GATEWAY, model=byte_model(max_context=4096)) as world,
        world.http_client(timeout=60) as http,
    ):
        await check_served(world, http)
        assert (await http.post("/v1/completions", json=body, headers=bearer(KEY_A))).status_code == 400
        assert world.gateway.processor.threads.has_had_its_share(Attacker())
        assert not world.gateway.processor.threads.has_had_its_share(Attacker("b"))


def has_done(tasks: Sequence["asyncio.Task[Any]"], num: int) -> bool:
    return sum(task.done() for task in tasks) == num


async def test_who_is_refused_again_and_again_hears_of_it_later_and_others_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(refusal_pace, "_PER_S", 0.001)
    monkeypatch.setattr(refusal_pace, "_MAX_WAIT_S", 60.0)
    async with open_world(**GATEWAY) as world, world.http_client(timeout=60) as http:
        bad = {**BODY, "temperature": 9}
        of_a = [asyncio.create_task(http.post("/v1/completions", json=bad, headers=bearer(KEY_A))) for _ in range(25)]
        of_nobody = [asyncio.create_task(http.post("/v1/completions", json=BODY)) for _ in range(25)]
        for refused, statuses in ((of_a, {400, 429}), (of_nobody, {401})):
            await world.until(partial(has_done, refused, 20), "twenty at once")
            assert {one.result().status_code for one in refused if one.done()} <= statuses
        await check_served(world, http)
        assert (await http.post("/v1/completions", json=BODY, headers=bearer(KEY_A))).status_code == 200
        for refused in (of_a, of_nobody):
            assert has_done(refused, 20)
            for one in refused:
                one.cancel()
        await asyncio.gather(*of_a, *of_nobody, return_exceptions=True)


class WatchedTemplate(LineTemplate):
    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def render(self, *args: Any, **kwargs: Any) -> str:
        self.threads.append(threading.current_thread())
        return super().render(*args, **kwargs)


async def test_long_conversations_are_written_out_and_large_bodies_read_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    template, here = WatchedTemplate(), threading.current_thread()
    parsed: list[threading.Thread] = []
    num_held: list[int] = []

    def parse(*args: Any) -> Any:
        parsed.append(threading.current_thread())
        num_held.append(world.bodies.num_bytes)
        return parse_body(*args)

    monkeypatch.setattr("weir_gateway.frontends.http_frontend.parse_body", parse)
    model = replace(byte_model(max_context=4096), chat_template=template)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    long_tool = {"type": "function", "function": {"name": "f", "description": "x" * 2500}}
    of_many = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "required": ["x"] * 2500}},
    }
    turn = {"role": "user", "content": "hi"}

    def called(text: str) -> tuple[Any, Any]:
        function = {"name": "f", "arguments": f'{{"x": "{text}"}}'}
        calls = [{"id": "1", "type": "function", "function": function}]
        return {"role": "assistant", "tool_calls": calls}, {"role": "tool", "tool_call_id": "1", "content": "done"}

    async with open_world(**GATEWAY, model=model) as world, world.http_client() as http:
        for asked, is_large, is_long in (
            ({"messages": [turn]}, False, False),
            ({"messages": [turn] * 65}, False, True),
            ({"messages": [{**turn, "content": "x" * 2500}]}, False, True),
            ({"messages": [turn], "tools": [tool]}, False, False),
            ({"messages": [turn, *called("1")]}, False, False),
            ({"messages": [turn, *called("1" * 2500)]}, False, True),
            ({"messages": [turn], "tools": [long_tool]}, False, True),
            ({"messages": [turn], "tools": [of_many]}, False, True),
            ({"messages": [turn], "user": "x" * 70_000}, True, False),
        ):
            body = {**asked, "max_tokens": 1}
            response = await http.post("/v1/chat/completions", json=body, headers=bearer(KEY_A))
            assert response.status_code == 200, response.text
            assert (parsed.pop() is not here, template.threads.pop() is not here) == (is_large, is_long), asked
            assert num_held.pop() == len(response.request.content), "its bytes count until it is read"


async def test_whose_body_is_still_coming_when_the_gateway_ends_is_told_so_and_no_defect_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with open_world(**GATEWAY) as world, half_sent_bodies(world, 3, 200_000) as answers:
        await world.until(lambda: world.bodies.num_bytes == 3 * 200_000, "all that is sent of them is there")
        await world.gateway.stop()
        for answer in await asyncio.gather(*answers):
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"the gateway is shutting down" in answer
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []

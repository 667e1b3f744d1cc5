"""Bodies with too much in them are refused before an object is made of any of it."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.gateway.world import FAST, World, open_world

from weir.core.errors import FieldViolation, InvalidRequest
from weir_gateway import json_sizes
from weir_gateway.config import GatewayConfig
from weir_gateway.frontends.bodies.function_tools import arguments_of
from weir_gateway.frontends.openai.schema import ChatBody, CompletionBody, parse_body
from weir_gateway.json_sizes import try_find_size_problem
from weir_gateway.settings import GatewaySettings

MEBIBYTE = 1 << 20

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('a"\\{}[],é\n')),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.sampled_from('b"\\{,')), inner),
)


def counts_of(value: object) -> tuple[int, int, int]:
    """Containers, texts, and commas between entries."""
    if isinstance(value, str):
        return 0, 1, 0
    if not isinstance(value, list | dict):
        return 0, 0, 0
    parts = list(value.values()) if isinstance(value, dict) else value
    inner = [counts_of(part) for part in parts]
    num_names = len(value) if isinstance(value, dict) else 0
    return (
        1 + sum(one[0] for one in inner),
        num_names + sum(one[1] for one in inner),
        max(0, len(parts) - 1) + sum(one[2] for one in inner),
    )


@given(value=JSON, ascii_only=st.booleans(), limits=st.tuples(*[st.integers(0, 8)] * 3), piece_bytes=st.integers(1, 20))
def test_what_is_in_texts_does_not_count_and_all_else_does(
    value: object, ascii_only: bool, limits: tuple[int, int, int], piece_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_sizes, "_SHORT_BYTES", 0)
        patch.setattr(json_sizes, "_PIECE_BYTES", piece_bytes)
        for name, limit in zip(("MAX_CONTAINERS", "MAX_TEXTS", "MAX_VALUES"), limits, strict=True):
            patch.setattr(json_sizes, name, limit)
        problem = try_find_size_problem(json.dumps(value, ensure_ascii=ascii_only).encode())
    is_within = all(number <= limit for number, limit in zip(counts_of(value), limits, strict=True))
    assert (problem is None) == is_within


@given(numbers=st.lists(st.integers(0, 10**45)), limit=st.integers(0, 5), piece_bytes=st.integers(1, 20))
def test_a_long_number_counts_once_for_each_twenty_digits(numbers: list[int], limit: int, piece_bytes: int) -> None:
    raw = json.dumps(numbers).encode() + b" " * 20 * 6
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("_SHORT_BYTES", 0), ("_PIECE_BYTES", piece_bytes), ("MAX_LONG_NUMBERS", limit)):
            patch.setattr(json_sizes, name, value)
        problem = try_find_size_problem(raw)
    assert (problem is None) == (sum(len(str(number)) // 20 for number in numbers) <= limit)


MANY: Mapping[str, tuple[bytes, str]] = {
    "objects": (b'{"prompt":"x","y":[' + b"{}," * 100_000 + b"{}]}", "32768 objects and lists"),
    "lists": (b'{"prompt":"x","y":[' + b"[]," * 100_000 + b"[]]}", "32768 objects and lists"),
    "texts": (b'{"prompt":[' + b'"",' * 200_000 + b'""]}', "131072 texts"),
    "names": (json.dumps({"prompt": "x", "y": dict.fromkeys(map(str, range(140_000)), 1)}).encode(), "131072 texts"),
    "numbers": (b'{"prompt":[' + b"1," * 1_200_000 + b"1]}", "1114112 values"),
    "long numbers": (b'{"prompt":[' + b"12345678901234567890," * 70_000 + b"1]}", "65536 numbers of 20 digits"),
}


@pytest.mark.parametrize("kind", MANY)
def test_too_many_are_refused_with_the_bound(kind: str) -> None:
    raw, limit = MANY[kind]
    with pytest.raises(InvalidRequest, match=rf"^body: has more than {limit}; send less at once$"):
        parse_body(CompletionBody, raw)


class Unencoded(str):
    def encode(self, *args: str, **kwargs: str) -> bytes:
        pytest.fail("it is short enough to see that without")


def test_of_short_arguments_no_bytes_are_made_and_long_ones_are_counted() -> None:
    violations: list[FieldViolation] = []
    assert arguments_of(Unencoded('{"x": 1}'), "arguments", violations) == {"x": 1}
    assert violations == []
    arguments_of('{"x": [' + "[]," * 100_000 + "[]]}", "arguments", violations)
    assert [(one.field, one.description[:40]) for one in violations] == [
        ("arguments", "has more than 32768 objects and lists; s")
    ]


def test_a_list_of_as_many_prompts_as_may_be_is_read() -> None:
    ids = [150_000 + number for number in range(4096)]
    for prompts in ([ids] * 256, [ids * 256], ["x" * 40_000] * 256):
        raw = json.dumps({"prompt": prompts, "stop_token_ids": [1] * 32, "logit_bias": {"1": 1, "2": 2}}).encode()
        assert len(raw) < GatewaySettings.of(GatewayConfig()).http.max_body_bytes
        assert parse_body(CompletionBody, raw).prompt == prompts


def test_texts_full_of_marks_and_long_lists_of_token_ids_are_read() -> None:
    code = 'if (a["b"]) { c([1, 2], {"d": "\\\\"}); }\n' * 50_000
    assert parse_body(CompletionBody, json.dumps({"prompt": code}).encode()).prompt == code
    prompts = [list(range(8192))] * 60
    assert parse_body(CompletionBody, json.dumps({"prompt": prompts}).encode()).prompt == prompts


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ({"messages": [{"role": "user", "content": "x"}] * 5000}, "messages: has 5000 entries"),
        ({"messages": [{"role": "nobody"}] * 5000}, "messages: has 5000 entries"),
        ({"messages": [], "stop_token_ids": [1] * 5000}, "stop_token_ids: has 5000 entries"),
        ({"messages": [], "logit_bias": dict.fromkeys(map(str, range(5000)), 1)}, "logit_bias: has over 4096 entries"),
    ],
)
def test_lists_of_a_field_are_bounded_by_the_field(body: dict[str, Any], found: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_body(ChatBody, json.dumps(body).encode())
    assert str(refused.value) == f"{found}; at most 4096 are read"


def test_a_body_may_be_so_long_that_a_prompt_that_is_too_long_is_named_and_a_list_fits() -> None:
    for num_bytes, num_prompts, expected in (
        (1 << 20, 1, 8 << 20),
        (2 << 20, 1, 14 << 20),
        (1 << 20, 256, 18 << 20),
        (1 << 20, 512, 34 << 20),
        (1 << 30, 256, 64 << 20),
    ):
        config = GatewayConfig(max_prompt_bytes=num_bytes, max_prompts=num_prompts)
        assert GatewaySettings.of(config).http.max_body_bytes == expected
    prompt = "\x01" * (MEBIBYTE + 1)
    assert len(json.dumps({"prompt": prompt, "max_tokens": 1})) < 8 << 20
    assert GatewaySettings.of(GatewayConfig(max_bodies_bytes=10 << 20)).http.max_body_bytes == 10 << 20


@pytest.fixture
async def http(world: World) -> AsyncIterator[httpx.AsyncClient]:
    async with world.http_client(timeout=60) as client:
        yield client


def turns() -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "Hi"}] * 100_000}).encode()


def names() -> bytes:
    return json.dumps({"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(400_000)), 1)}).encode()


HOSTILE: Mapping[str, tuple[str, Callable[[], bytes]]] = {
    "100,000 turns": ("/v1/chat/completions", turns),
    "4 MiB of empty lists": (
        "/v1/completions",
        lambda: b'{"prompt":"x","y":[' + b"[]," * (4 * MEBIBYTE // 3) + b"[]]}",
    ),
    "4 MiB of empty objects": ("/v1/completions", lambda: b'{"prompt":[' + b"{}," * (4 * MEBIBYTE // 3) + b"{}]}"),
    "4 MiB of numbers": ("/tokenize", lambda: b'{"prompt":[' + b"1," * (2 * MEBIBYTE) + b"1]}"),
    "4 MiB of names": ("/v1/completions", names),
}


@pytest.mark.parametrize("kind", HOSTILE)
async def test_a_body_of_small_parts_stalls_nobody(world: World, http: httpx.AsyncClient, kind: str) -> None:
    path, make_body = HOSTILE[kind]
    body = make_body()
    # by the time of the process, of which other ones take nothing
    longest_s, last_s, is_over = 0.0, time.process_time(), False

    async def watch() -> None:
        nonlocal longest_s, last_s
        while not is_over:
            await asyncio.sleep(0.001)
            longest_s, last_s = max(longest_s, time.process_time() - last_s), time.process_time()

    async def send() -> httpx.Response:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.gateway.http_port)
        writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        head = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        return httpx.Response(int(head.split()[1]))

    watching = asyncio.create_task(watch())
    try:
        assert (await send()).status_code == 400
    finally:
        is_over = True
        await watching
    assert longest_s < 0.15, "300 ms and more, were objects made of it"


async def test_a_list_of_long_prompts_of_token_ids_is_answered() -> None:
    body = {"prompt": [[number % 256 for number in range(2048)]] * 256, "max_tokens": 1, "temperature": 0}
    settings = replace(FAST, driver=replace(FAST.driver, max_requests=300))
    async with open_world(settings, max_context=4096) as world, world.http_client() as http:
        response = await http.post("/v1/completions", json=body, timeout=60)
        assert response.status_code == 200, response.text
        assert len(response.json()["choices"]) == 256

"""Grammars that explode, never end or are no text at all: each gets its status, and nobody else waits for it."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from tests.unit.gateway.test_access import CLOSED, KEY_A, KEY_B
from tests.unit.gateway.test_tenants_at_the_frontends import BODY, bearer, write
from tests.unit.gateway.world import FAST, World, open_world

from weir.core.grammar import Grammar
from weir.grammar.llguidance_engine import LlguidanceEngine
from weir.grammar.protocol import CompiledGrammar, GrammarEngine
from weir.model.tokens.vocabulary import vocabulary_of
from weir_gateway.requests import grammars
from weir_gateway.requests.models import ServedModel

EITHER = {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "array", "items": {"$ref": "#/$defs/b"}}]}
BOTH = {"allOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/c"}]}
HOSTILE: dict[str, dict[str, Any]] = {
    "a regular expression of a million states": {"regex": "(a{1,1000}){1,1000}"},
    "repeated thrice": {"regex": "((x{0,99}y){0,99}z){0,99}"},
    "alternatives that share all": {"regex": "(" + "|".join("a" * n + "b" for n in range(900)) + ")*c"},
    "look-around": {"regex": "(?<=a)b"},
    "itself": {"json": {"$ref": "#"}},
    "two that refer to one another": {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": BOTH}}},
    "a doubling": {"json": {"allOf": [{"anyOf": [{"maxLength": n}, {"minimum": n}]} for n in range(60)]}},
    "a megabyte": {"json": {"description": "x" * (1 << 20)}},
    "a megabyte of text": {"regex": "a" * (1 << 20)},
    "10,000 deep": {"json": '{"items":' * 10_000 + "{}" + "}" * 10_000},
    "NUL": {"regex": "a\0b"},
    "NUL in a schema": {"json": {"const": "a\0b"}},
    "a lone surrogate": {"json": '{"const": "\\ud800"}'},
    "a lone surrogate in an expression": {"regex": "\ud800"},
    "a key twice": {"json": '{"type": "string", "type": "integer"}'},
    "a million items": {"json": {"type": "array", "minItems": 10**6}},
    "a number without end": {"json": {"minimum": 10**400}},
    "a grammar of itself": {"grammar": "start: start"},
    "text": {"grammar": "\x01\x02%%%%"},
    "no JSON": {"json": "{"},
}

LARGE_BUT_RIGHT = {"a regular expression of a million states", "repeated thrice", "a million items"}
"""The engine makes their states as they come, and bounds each step."""


class SlowEngine:
    """The real one; of sources that begin with `slow` none is compiled before `may_end`."""

    def __init__(self, model: ServedModel) -> None:
        self._engine = LlguidanceEngine(vocabulary_of(model.tokenizer, model.vocab_size, model.eos_token_ids))
        self.may_end = threading.Event()
        self.num_begun = 0

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        if grammar.source.startswith("slow"):
            self.num_begun += 1
            self.may_end.wait(60)
        return self._engine.compile(grammar)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SlowEngine]]:
    made: list[SlowEngine] = []

    def make(model: ServedModel) -> GrammarEngine:
        made.append(SlowEngine(model))
        return made[-1]

    monkeypatch.setattr(grammars, "_engine_of", make)
    yield made
    for engine in made:
        engine.may_end.set()


@pytest.fixture
async def world(engines: list[SlowEngine]) -> AsyncIterator[World]:
    """Its engine is made at its start."""
    async with open_world(replace(FAST, driver=replace(FAST.driver, max_requests=64))) as world:
        yield world


@pytest.fixture
async def http(world: World) -> AsyncIterator[httpx.AsyncClient]:
    async with world.http_client(timeout=60) as client:
        yield client


def body_of(**constraint: object) -> dict[str, Any]:
    return {**BODY, "structured_outputs": constraint}


async def test_each_gets_its_status(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_COMPILE_TIMEOUT_S", 20.0)  # on a busy machine
    answers = {}
    for name, constraint in HOSTILE.items():
        content = json.dumps(body_of(**constraint))  # ASCII, so that a lone surrogate can be sent
        answers[name] = await http.post(
            "/v1/completions", content=content, headers={"Content-Type": "application/json"}
        )
    accepted = {name for name, answer in answers.items() if answer.status_code == 200}
    assert accepted == LARGE_BUT_RIGHT
    for name in HOSTILE.keys() - accepted:
        error = answers[name].json()["error"]
        assert answers[name].status_code == 400, name
        assert len(error["message"]) < 500, name
        if name != "a lone surrogate in an expression":  # no text of a body has one: not of this field alone
            assert error["param"] == f"structured_outputs.{next(iter(HOSTILE[name]))}"


async def test_a_tenant_with_slow_grammars_waits_for_itself_and_no_other_does(
    world: World, http: httpx.AsyncClient, engines: list[SlowEngine]
) -> None:
    await write(world, CLOSED)
    sends = [http.post("/v1/completions", json=body_of(regex=f"slow{n}"), headers=bearer(KEY_A)) for n in range(20)]
    slow = [asyncio.create_task(send) for send in sends]
    await world.until(lambda: world.metric("grammars_waiting") == 16, "the tenant has all that it may have")

    for n in range(5):  # while none of them ends
        answer = await http.post("/v1/completions", json=body_of(regex=f"{n}+"), headers=bearer(KEY_B))
        assert answer.status_code == 200
        plain = await http.post("/v1/completions", json=BODY, headers=bearer(KEY_A))
        assert plain.status_code == 200
    assert engines[0].num_begun == 1

    answers = await asyncio.gather(*slow)
    assert {answer.status_code for answer in answers} == {429}
    messages = [answer.json()["error"]["message"] for answer in answers]
    assert sum("tenant a: 16 of its grammars wait" in message for message in messages) == 4
    assert sum("being compiled still" in message for message in messages) == 16
    assert {float(answer.headers["Retry-After"]) for answer in answers} == {1}
    engines[0].may_end.set()
    await world.until(lambda: world.metric("grammars_waiting") == 0, "all are compiled")
    for n in range(16):
        again = await http.post("/v1/completions", json=body_of(regex=f"slow{n}"), headers=bearer(KEY_A))
        assert again.status_code == 200
    assert engines[0].num_begun == 16  # one for each, though they were asked for twice


async def test_a_slow_grammar_that_is_asked_for_again_is_compiled_once(
    world: World, http: httpx.AsyncClient, engines: list[SlowEngine]
) -> None:
    sends = [http.post("/v1/completions", json=body_of(regex="slow")) for _ in range(30)]
    answers = await asyncio.gather(*sends)
    assert {answer.status_code for answer in answers} == {429}
    assert world.metric("grammars_waiting") == 1
    engines[0].may_end.set()
    await world.until(lambda: world.metric("grammars_waiting") == 0, "it is compiled")
    assert engines[0].num_begun == 1


async def test_a_gateway_that_stops_leaves_a_slow_grammar(world: World, engines: list[SlowEngine]) -> None:
    async with world.http_client(timeout=60) as client:
        answer = await client.post("/v1/completions", json=body_of(regex="slow"))
    assert answer.status_code == 429
    assert engines[0].num_begun == 1  # the world is closed with it under way

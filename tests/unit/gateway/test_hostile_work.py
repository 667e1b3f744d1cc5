"""What can be seen to be wrong is refused before anything is compiled, tokenized or sent; what has to be compiled is
compiled within bounds of steps, not of time, and no client waits for it a second."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from tests.unit.gateway.world import World

from weir.core.grammar import MAX_GRAMMAR_BYTES, Grammar
from weir.grammar.llguidance_engine import LlguidanceEngine
from weir.grammar.protocol import CompiledGrammar
from weir.model.tokens.vocabulary import vocabulary_of
from weir.wire.v1 import inference_pb2
from weir_gateway.requests import grammars
from weir_gateway.requests.models import ServedModel

USER: Any = [{"role": "user", "content": "x"}]
LARGE = {"description": "x" * MAX_GRAMMAR_BYTES}


def tool(name: str, schema: Any = None, *, strict: bool = True) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "parameters": schema or {"type": "object"}, "strict": strict},
    }


SEEN_AT_ONCE: dict[str, dict[str, Any]] = {
    "tools of one name": {"tools": [tool("same")] * 128},
    "too many tools": {"tools": [tool(f"t{number}") for number in range(129)]},
    "tools of a megabyte": {"tools": [tool("x", {"type": "object", "description": "x" * (1 << 20)})]},
    "strict tools of more than a grammar": {"tools": [tool("a", LARGE), tool("b")]},
    "a schema of more than a grammar": {"structured_outputs": {"json": LARGE}},
    "an expression of more than a grammar": {"structured_outputs": {"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}},
    "a program for a template": {"chat_template": "{% for a in range(10**9) %}x{% endfor %}"},
    "too many turns": {"messages": USER * 5000},
}


class CountingEngine:
    """The real one, counted."""

    num_compiled = 0

    def __init__(self, model: ServedModel) -> None:
        self._engine = LlguidanceEngine(vocabulary_of(model.tokenizer, model.vocab_size, model.eos_token_ids))

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        type(self).num_compiled += 1
        return self._engine.compile(grammar)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[CountingEngine]:
    monkeypatch.setattr(grammars, "_engine_of", CountingEngine)
    monkeypatch.setattr(grammars, "_COMPILE_TIMEOUT_S", 20.0)  # on a busy machine
    monkeypatch.setattr(CountingEngine, "num_compiled", 0)
    return CountingEngine


@pytest.fixture
async def http(world: World) -> AsyncIterator[httpx.AsyncClient]:
    async with world.http_client(timeout=60) as http:
        yield http


async def test_what_can_be_seen_costs_no_compiling_and_no_worker(
    world: World, http: httpx.AsyncClient, engine: type[CountingEngine]
) -> None:
    for name, fields in SEEN_AT_ONCE.items():
        answer = await http.post("/v1/chat/completions", json={"messages": USER, **fields})
        assert answer.status_code == 400, name
        assert len(answer.text) < 1000, name
    assert engine.num_compiled == 0
    assert world.prefill.named("start") == []


async def test_the_same_holds_over_grpc(world: World, engine: type[CountingEngine]) -> None:
    message = inference_pb2.ChatMessage(role="user", content="x")
    same = [inference_pb2.Tool(name="same")] * 128
    many = [inference_pb2.Tool(name=f"t{number}") for number in range(10_000)]
    large = [inference_pb2.Tool(name="x", parameters='{"description": "' + "x" * (3 << 20) + '"}')]
    deep = [inference_pb2.Tool(name="x", parameters='{"items":' * 100_000)]
    calls = [inference_pb2.ToolCall(id="1", name="x")] * 5000
    hostile = [
        inference_pb2.ChatRequest(messages=[message], tools=same),
        inference_pb2.ChatRequest(messages=[message], tools=many),
        inference_pb2.ChatRequest(messages=[message], tools=large),
        inference_pb2.ChatRequest(messages=[message], tools=deep),
        inference_pb2.ChatRequest(messages=[inference_pb2.ChatMessage(role="assistant", tool_calls=calls)]),
    ]
    for request in hostile:
        with pytest.raises(Exception, match="INVALID_ARGUMENT"):
            _ = [response async for response in world.stub.Chat(request)]
    assert engine.num_compiled == 0
    assert world.prefill.named("start") == []


async def test_one_that_must_be_compiled_is_so_once_and_by_steps_that_are_bounded(
    world: World, http: httpx.AsyncClient, engine: type[CountingEngine]
) -> None:
    """The engine counts steps: too many are an error of the grammar. Of a tool its schema is compiled alone, too."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^((a{0,999}b){0,999}c){0,999}d$"}}}
    body = {"messages": USER, "tools": [tool("x", schema)], "tool_choice": "required", "max_tokens": 4}
    first = await http.post("/v1/chat/completions", json=body)
    num_compiled = engine.num_compiled
    assert num_compiled <= 2
    again = await http.post("/v1/chat/completions", json=body)
    assert first.status_code == again.status_code
    assert engine.num_compiled <= (num_compiled if first.status_code == 200 else 2 * num_compiled)


def test_nobody_waits_a_second_for_a_grammar() -> None:
    assert grammars._COMPILE_TIMEOUT_S < 1

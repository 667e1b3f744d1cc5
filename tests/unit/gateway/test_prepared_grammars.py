"""What the first grammar of a model would wait for is done before the gateway says that it is ready."""

import threading
from typing import Any

import pytest
from tests.unit.gateway.fake_model import byte_model
from tests.unit.gateway.world import open_world

from weir.grammar.protocol import GrammarError
from weir.runtime.stack.models import MAX_MODELS
from weir_gateway.frontends.http_server import HttpServer
from weir_gateway.requests import grammars
from weir_gateway.requests.grammars import GrammarChecks
from weir_gateway.requests.models import ServedModel


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done, in order: `engine` of a model, and `open` the port."""
    done: list[str] = []
    start, make_engine = HttpServer.start, grammars._engine_of

    async def start_noted(server: HttpServer) -> None:
        done.append("open")
        await start(server)

    def make_noted(model: ServedModel) -> Any:
        done.append(f"engine of {model.name}")
        return make_engine(model)

    monkeypatch.setattr(HttpServer, "start", start_noted)
    monkeypatch.setattr(grammars, "_engine_of", make_noted)
    return done


async def test_the_vocabulary_is_read_before_anybody_is_served_and_never_again(done: list[str]) -> None:
    async with open_world() as world, world.http_client() as http:
        assert done == ["engine of bytes", "open"]
        for pattern in ("hel*o", "[a-z]+"):
            body = {"prompt": "x", "max_tokens": 5, "structured_outputs": {"regex": pattern}}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
        assert done == ["engine of bytes", "open"]


async def test_a_model_that_can_have_no_grammars_is_served_without(done: list[str]) -> None:
    model = byte_model()
    endless = ServedModel("endless", 512, 257, (), model.tokenizer, model.chat_template)
    async with open_world(model=endless) as world, world.http_client() as http:
        assert done == ["engine of endless", "open"]
        body = {"prompt": "x", "max_tokens": 5, "structured_outputs": {"regex": "a"}}
        refused = await http.post("/v1/completions", json=body)
        assert refused.status_code == 400
        assert "no end-of-text token" in refused.json()["error"]["message"]


async def test_a_model_whose_vocabulary_breaks_what_reads_it_is_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(model: ServedModel) -> Any:
        raise RuntimeError("a defect")

    monkeypatch.setattr(grammars, "_engine_of", fail)
    async with open_world() as world, world.http_client() as http:
        assert "bytes: its vocabulary cannot be read for grammars" in caplog.text
        assert (await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 5})).status_code == 200


async def test_a_model_whose_vocabulary_takes_too_long_is_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    may_end = threading.Event()

    def wait(model: ServedModel) -> Any:
        may_end.wait(20)
        raise GrammarError("none")

    monkeypatch.setattr(grammars, "_engine_of", wait)
    monkeypatch.setattr(grammars, "_PREPARE_TIMEOUT_S", 0.1)
    try:
        async with open_world() as world, world.http_client() as http:
            assert "bytes: its vocabulary is not ready for grammars after 0.1 s" in caplog.text
            assert (await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 5})).status_code == 200
            with_grammar = {"prompt": "x", "max_tokens": 5, "structured_outputs": {"choice": ["a"]}}
            refused = await http.post("/v1/completions", json=with_grammar)
            assert refused.status_code == 429, "soon, and not when it is ready"
            assert "its grammar is being compiled still" in refused.json()["error"]["message"]
    finally:
        may_end.set()


async def test_as_many_models_as_a_stack_has_stay_prepared(done: list[str]) -> None:
    checks, template = GrammarChecks(), byte_model()
    models = [
        ServedModel(f"m{number}", 512, 257, (256,), byte_model().tokenizer, template.chat_template)
        for number in range(MAX_MODELS)
    ]
    for _ in range(2):
        await checks.prepare(models)
    assert done == [f"engine of m{number}" for number in range(MAX_MODELS)]
    checks.close()

"""`weir generate` and `weir chat` against a gateway that says what a test tells it to."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from weir.cli.main import app
from weir.wire.v1 import inference_pb2, types_pb2


class ScriptedGateway:
    """Answers a prompt with its words reversed; "fail" is refused, and "twice" fails the first time only."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.conversations: list[list[tuple[str, str]]] = []
        self.options: list[inference_pb2.RequestOptions] = []
        self.most_at_once = 0
        self._num_running = 0
        self._lock = threading.Lock()

    def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> Iterator[Any]:  # noqa: N802
        with self._lock:
            self.prompts.append(request.text)
            self.options.append(request.options)
            self._num_running += 1
            self.most_at_once = max(self.most_at_once, self._num_running)
        if request.text == "fail" or (request.text == "twice" and self.prompts.count("twice") == 1):
            with self._lock:
                self._num_running -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "no worker")
        yield from self._answer(inference_pb2.GenerateResponse, request.text)
        with self._lock:
            self._num_running -= 1

    def Chat(self, request: inference_pb2.ChatRequest, context: Any) -> Iterator[Any]:  # noqa: N802
        self.conversations.append([(turn.role, turn.content) for turn in request.messages])
        if request.messages[-1].content == "fail":
            context.abort(grpc.StatusCode.UNAVAILABLE, "no worker")
        yield from self._answer(inference_pb2.ChatResponse, request.messages[-1].content)

    def _answer(self, response: Any, text: str) -> Iterator[Any]:
        for word in reversed(text.split()):
            yield response(text=word + " ")
        usage = types_pb2.Usage(num_prompt_tokens=3, num_output_tokens=2)
        yield response(finish_reason=types_pb2.FINISH_REASON_STOP, usage=usage)


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedGateway]:
    """Listens where the commands look for it."""
    servicer: Any = ScriptedGateway()
    server = grpc.server(ThreadPoolExecutor(max_workers=16))
    kinds: dict[str, tuple[Any, Any]] = {
        "Generate": (servicer.Generate, inference_pb2.GenerateRequest),
        "Chat": (servicer.Chat, inference_pb2.ChatRequest),
    }
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        name: grpc.unary_stream_rpc_method_handler(
            method,
            request_deserializer=request.FromString,
            response_serializer=lambda message: message.SerializeToString(),
        )
        for name, (method, request) in kinds.items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("weir.v1.Inference", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("WEIR_ADDRESS", f"127.0.0.1:{port}")
    yield servicer
    server.stop(None).wait()


def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
    result = CliRunner().invoke(app, arguments, input=stdin, prog_name="weir")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def answers(path: Path) -> dict[Any, Any]:
    return {entry["id"]: entry for entry in map(json.loads, path.read_text().splitlines())}


def test_a_prompt_is_answered_on_stdout_and_its_options_arrive(gateway: ScriptedGateway) -> None:
    flags = ("--temperature", "0", "--top-k", "5", "--top-p", "0.5", "--seed", "7", "--max-tokens", "9")
    code, out, _ = run("generate", *flags, "--stop", "a", "--stop", "b", "--ignore-eos", "--lane", "batch", "one two")
    assert (code, out) == (0, "two one \n")
    (options,) = gateway.options
    sampling, conditions = options.sampling, options.stop_conditions
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.0, 5, 0.5, 7)
    assert (conditions.max_tokens, list(conditions.stop), conditions.ignore_eos) == (9, ["a", "b"], True)
    assert options.lane == "batch"


def test_an_option_that_is_not_given_is_left_to_the_gateway(gateway: ScriptedGateway) -> None:
    run("generate", "one")
    (options,) = gateway.options
    assert not any(options.sampling.HasField(name) for name in ("temperature", "top_k", "top_p", "seed"))
    assert not options.stop_conditions.HasField("max_tokens")


def test_a_failed_prompt_is_one_line_and_exit_code_1(gateway: ScriptedGateway) -> None:
    code, _, err = run("generate", "fail")
    assert code == 1
    assert err == "error: no worker\n"


@pytest.mark.parametrize(
    "arguments", [(), ("a", "--input", "x.jsonl", "--output", "y"), ("--input", "x.jsonl"), ("a", "--output", "y")]
)
def test_generate_says_how_it_is_to_be_used(arguments: tuple[str, ...]) -> None:
    code, _, err = run("generate", *arguments)
    assert code == 2
    assert err.startswith("error: ")


def test_a_file_is_answered_failures_are_written_and_the_next_run_tries_only_those(
    gateway: ScriptedGateway, tmp_path: Path
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts = [f"prompt {number}" for number in range(30)] + ["twice", "fail"]
    source.write_text("".join(json.dumps({"prompt": prompt, "id": prompt}) + "\n" for prompt in prompts))
    command = ("generate", "--input", str(source), "--output", str(target), "--concurrency", "4")

    code, _, err = run(*command)
    assert code == 1
    assert "30 of 32 answered, 2 failed" in err
    first = answers(target)
    assert first["prompt 7"] == {
        "id": "prompt 7",
        "text": "7 prompt ",
        "finish_reason": "stop",
        "num_prompt_tokens": 3,
        "num_output_tokens": 2,
    }
    assert first["twice"] == {"id": "twice", "error": "no worker"}
    assert 1 < gateway.most_at_once <= 4

    gateway.prompts.clear()
    gateway.prompts.append("twice")
    code, _, err = run(*command)
    assert code == 1
    assert sorted(gateway.prompts[1:]) == ["fail", "twice"]
    assert answers(target)["twice"]["text"] == "twice "
    assert len(answers(target)) == 32


def test_an_output_that_cannot_be_written_is_one_line(gateway: ScriptedGateway, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n')
    code, _, err = run("generate", "--input", str(source), "--output", str(tmp_path / "none" / "out.jsonl"))
    assert code == 1
    assert err.startswith(f"error: --output {tmp_path}/none/out.jsonl: ")
    assert gateway.prompts == []


def test_a_chat_keeps_its_turns_and_forgets_them_on_reset(gateway: ScriptedGateway) -> None:
    said = "hello you\nfail\nagain\n/reset\nnew\n/quit\nnever\n"
    code, out, err = run("chat", "--system", "be short", stdin=said)
    assert code == 0
    assert out == "you hello \nagain \nnew \n"
    assert "error: no worker" in err
    system = ("system", "be short")
    assert gateway.conversations == [
        [system, ("user", "hello you")],
        [system, ("user", "hello you"), ("assistant", "you hello "), ("user", "fail")],
        [system, ("user", "hello you"), ("assistant", "you hello "), ("user", "again")],
        [system, ("user", "new")],
    ]


def test_a_chat_ends_with_its_input(gateway: ScriptedGateway) -> None:
    assert run("chat", stdin="one two\n")[:2] == (0, "two one \n")

"""`weir generate` and `weir chat` against a gateway that answers as a test has it."""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from weir.cli.app import app
from weir.cli.chat import chat
from weir.cli.generate import generate
from weir.core.options import NUMBER_RULES, GenerateOptions
from weir.rpc.conversions import options_to_pb
from weir.wire.v1 import inference_pb2, types_pb2


class ReversingGateway:
    """Answers a prompt with its words reversed; "fail" is refused, "half" breaks off, "twice" fails the first time."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.conversations: list[list[tuple[str, str]]] = []
        self.chats: list[inference_pb2.ChatRequest] = []
        self.parts: list[inference_pb2.AnswerPart] = []
        """What chats are answered with, one a message, instead."""
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
        if request.text == "half":
            yield inference_pb2.GenerateResponse(text="half ")
            context.abort(grpc.StatusCode.UNAVAILABLE, "no worker")
        if request.options.n > 1:
            yield from self._answer_each(request.options.n)
        else:
            yield from self._answer(inference_pb2.GenerateResponse, request.text)
        with self._lock:
            self._num_running -= 1

    def Chat(self, request: inference_pb2.ChatRequest, context: Any) -> Iterator[Any]:  # noqa: N802
        self.options.append(request.options)
        self.chats.append(request)
        self.conversations.append([(turn.role, turn.content) for turn in request.messages])
        if request.messages[-1].content == "fail":
            context.abort(grpc.StatusCode.UNAVAILABLE, "no worker")
        if not self.parts:
            yield from self._answer(inference_pb2.ChatResponse, request.messages[-1].content)
            return
        for part in self.parts:
            yield inference_pb2.ChatResponse(text="?", parts=inference_pb2.AnswerParts(parts=[part]))
        usage = types_pb2.Usage(num_prompt_tokens=3, num_output_tokens=9, num_reasoning_tokens=2)
        yield inference_pb2.ChatResponse(
            finish_reason=types_pb2.FINISH_REASON_TOOL_CALLS, usage=usage, parts=inference_pb2.AnswerParts()
        )

    def _answer_each(self, num_choices: int) -> Iterator[Any]:
        """Word by word in turn; the last choice ends first."""
        logprobs = types_pb2.TokenLogprobs(token_id=7, logprob=-0.5, rank=2, top_token_ids=[9], top_logprobs=[-0.25])
        for choice in range(num_choices):
            response = inference_pb2.GenerateResponse(choice=choice, text="answer ", token_ids=[7], logprobs=[logprobs])
            if choice == 0:
                response.prompt_logprobs.append(types_pb2.TokenLogprobs(token_id=3, logprob=-1.5, rank=4))
            yield response
        for choice in reversed(range(num_choices)):
            ended = inference_pb2.GenerateResponse(
                choice=choice, text=str(choice), finish_reason=types_pb2.FINISH_REASON_STOP
            )
            if choice == 0:
                ended.usage.CopyFrom(types_pb2.Usage(num_prompt_tokens=3, num_output_tokens=2 * num_choices))
            yield ended

    def _answer(self, response: Any, text: str) -> Iterator[Any]:
        for word in reversed(text.split()):
            yield response(text=word + " ")
        usage = types_pb2.Usage(num_prompt_tokens=3, num_output_tokens=2)
        yield response(finish_reason=types_pb2.FINISH_REASON_STOP, usage=usage)


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReversingGateway]:
    """Listens where the commands look for it."""
    servicer: Any = ReversingGateway()
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


def test_a_prompt_is_answered_on_stdout_and_its_options_arrive(gateway: ReversingGateway) -> None:
    flags = ("--temperature", "0", "--top-k", "5", "--top-p", "0.5", "--seed", "7", "--max-tokens", "9")
    code, out, _ = run("generate", *flags, "--stop", "a", "--stop", "b", "--ignore-eos", "--lane", "batch", "one two")
    assert (code, out) == (0, "two one \n")
    (options,) = gateway.options
    sampling, conditions = options.sampling, options.stop_conditions
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.0, 5, 0.5, 7)
    assert (conditions.max_tokens, list(conditions.stop), conditions.ignore_eos) == (9, ["a", "b"], True)
    assert options.lane == "batch"


@pytest.mark.parametrize("option", ["--logprobs", "--prompt-logprobs"])
def test_log_probabilities_that_nothing_would_show_are_refused(gateway: ReversingGateway, option: str) -> None:
    problem = "error: --logprobs and --prompt-logprobs are shown as JSON: give --json too\n"
    assert run("generate", option, "1", "x") == (2, "", problem)
    assert gateway.prompts == []


def test_an_option_that_is_not_given_is_left_to_the_gateway(gateway: ReversingGateway) -> None:
    run("generate", "one")
    (options,) = gateway.options
    assert options == options_to_pb(GenerateOptions())


def test_a_failed_prompt_is_one_line_and_exit_code_1(gateway: ReversingGateway) -> None:
    assert run("generate", "fail") == (1, "", "error: no worker\n")


def test_an_answer_that_breaks_off_ends_its_line(gateway: ReversingGateway) -> None:
    assert run("generate", "half") == (1, "half \n", "error: no worker\n")


def test_a_server_that_is_not_there_is_named_with_what_to_do() -> None:
    code, out, err = run("generate", "--address", "127.0.0.1:1", "one")
    assert (code, out) == (1, "")
    assert "127.0.0.1:1" in err
    assert err.endswith("; see whether a stack runs there, with `weir status`\n")


def test_an_empty_prompt_is_named() -> None:
    assert run("generate", "") == (2, "", "error: PROMPT is empty: give at least one character\n")


@pytest.mark.parametrize(
    "arguments", [(), ("a", "--input", "x.jsonl", "--output", "y"), ("--input", "x.jsonl"), ("a", "--output", "y")]
)
def test_generate_shows_how_it_is_to_be_used(arguments: tuple[str, ...]) -> None:
    code, _, err = run("generate", *arguments)
    assert code == 2
    assert err.startswith("error: ")


def test_a_file_is_answered_failures_are_written_and_the_next_run_tries_only_those(
    gateway: ReversingGateway, tmp_path: Path
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


def test_a_prompt_that_is_no_unicode_fails_alone(gateway: ReversingGateway, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a\\ud800"}\n{"prompt": "b"}\n')
    code, _, err = run("generate", "--input", str(source), "--output", str(target))
    assert (code, "1 of 2 answered, 1 failed" in err) == (1, True)
    assert "must be valid Unicode" in answers(target)[1]["error"]
    assert answers(target)[2]["text"] == "b "
    assert gateway.prompts == ["b"]


def test_an_output_that_cannot_be_written_is_one_line(gateway: ReversingGateway, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n')
    code, _, err = run("generate", "--input", str(source), "--output", str(tmp_path / "none" / "out.jsonl"))
    assert code == 1
    assert err.startswith(f"error: --output {tmp_path}/none/out.jsonl: ")
    assert gateway.prompts == []


def test_a_chat_keeps_its_turns_and_forgets_them_on_reset(gateway: ReversingGateway) -> None:
    lines = "hello you\nfail\nagain\n/reset\nnew\n/quit\nnever\n"
    code, out, err = run("chat", "--system", "be short", stdin=lines)
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


def test_a_chat_ends_with_its_input(gateway: ReversingGateway) -> None:
    assert run("chat", stdin="one two\n")[:2] == (0, "two one \n")


SAMPLING = (
    *("--temperature", "0.5", "--top-k", "7", "--top-p", "0.25", "--min-p", "0.125", "--seed", "9"),
    *("--repetition-penalty", "1.5", "--presence-penalty", "0.5", "--frequency-penalty", "-0.5"),
    *("--logit-bias", "5=-100", "--logit-bias", "7=2.5", "--max-tokens", "30", "--min-tokens", "2"),
    *("--stop", "END", "--stop-token-id", "11", "--stop-token-id", "12", "--include-stop"),
    *("--cache-salt", "team", "--skip-prefix-cache"),
)
GRAMMAR = {"grammar"}
"""`weir generate` makes it of --json-schema or --regex; a conversation is free."""
ONE_REQUESTS_OWN = {"request_id", "deadline_ms", "idempotency_key", "resume_from"}
"""A line of a file could not have the same, no command cancels by it or sends it again. The deadline is --timeout-s."""
NOT_IN_A_CHAT = {"n", "logprobs", "prompt_logprobs", "ignore_eos", "partial_at_deadline"}
"""What a conversation on a terminal has no place for."""


@pytest.mark.parametrize(
    ("command", "left_out"),
    [(generate, ONE_REQUESTS_OWN | GRAMMAR), (chat, ONE_REQUESTS_OWN | GRAMMAR | NOT_IN_A_CHAT)],
)
def test_the_commands_have_every_option_of_a_request(command: Callable[..., None], left_out: set[str]) -> None:
    of_request = {entry.name for entry in fields(GenerateOptions)}
    assert {rule.name for rule in NUMBER_RULES} <= of_request
    assert of_request - signature(command).parameters.keys() == left_out


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_every_sampling_option_reaches_the_gateway(gateway: ReversingGateway, command: str) -> None:
    if command == "generate":
        run("generate", *SAMPLING, "--ignore-eos", "--json", "--logprobs", "3", "--prompt-logprobs", "2", "x")
    else:
        run("chat", *SAMPLING, stdin="hello\n/quit\n")
    [options] = gateway.options
    sampling, stop = options.sampling, options.stop_conditions
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 7, 0.25, 0.125)
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    assert penalties == (1.5, 0.5, -0.5)
    assert dict(sampling.logit_bias) == {5: -100.0, 7: 2.5}
    assert (stop.max_tokens, stop.min_tokens, list(stop.stop), list(stop.stop_token_ids)) == (30, 2, ["END"], [11, 12])
    assert stop.include_stop
    assert (options.cache_salt, options.skips_prefix_cache) == ("team", True)
    assert (sampling.seed, stop.ignore_eos, sampling.HasField("logprobs")) == (9, *[command == "generate"] * 2)
    if command == "generate":
        assert (sampling.logprobs, sampling.prompt_logprobs) == (3, 2)


def test_partial_answers_have_the_time_out_for_a_deadline(gateway: ReversingGateway) -> None:
    run("generate", "--timeout-s", "1.5", "--partial-at-deadline", "x")
    run("generate", "--timeout-s", "1.5", "x")
    assert [options.partial_at_deadline for options in gateway.options] == [True, False]
    assert [options.deadline_ms for options in gateway.options] == [1500, 0]


@pytest.mark.parametrize("entry", ["5", "five=1", "5=much", "=", "5=1=2"])
def test_a_bias_that_is_none_is_refused_by_name(gateway: ReversingGateway, entry: str) -> None:
    code, _, stderr = run("generate", "--logit-bias", entry, "x")
    assert code == 2
    assert f"--logit-bias {entry}: give ID=BIAS" in stderr
    assert gateway.prompts == []


def test_several_answers_are_printed_each_when_it_is_complete(gateway: ReversingGateway) -> None:
    code, stdout, _ = run("generate", "--n", "3", "x")
    assert (code, stdout) == (0, "[2] answer 2\n[1] answer 1\n[0] answer 0\n")
    assert gateway.options[0].n == 3


def test_json_has_the_answer_with_what_was_asked_for(gateway: ReversingGateway) -> None:
    code, stdout, _ = run("generate", "--json", "one two")
    assert code == 0
    assert json.loads(stdout) == {
        "id": 1,
        "text": "two one ",
        "finish_reason": "stop",
        "num_prompt_tokens": 3,
        "num_output_tokens": 2,
    }
    _, stdout, _ = run("generate", "--json", "--n", "2", "--logprobs", "1", "--prompt-logprobs", "0", "x")
    answer = json.loads(stdout)
    logprobs = [{"token_id": 7, "logprob": -0.5, "rank": 2, "top": [[9, -0.25]]}]
    assert answer["choices"] == [
        {"text": "answer 0", "finish_reason": "stop", "logprobs": logprobs},
        {"text": "answer 1", "finish_reason": "stop", "logprobs": logprobs},
    ]
    assert answer["prompt_logprobs"] == [{"token_id": 3, "logprob": -1.5, "rank": 4, "top": []}]
    assert answer["num_output_tokens"] == 4
    code, stdout, _ = run("generate", "--json", "fail")
    assert (code, json.loads(stdout)) == (1, {"id": 1, "error": "no worker"})


def test_a_file_of_several_answers_each_is_gone_on_with(gateway: ReversingGateway, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    for _ in range(2):
        assert run("generate", "--n", "2", "--input", str(source), "--output", str(target))[0] == 0
    assert len(gateway.prompts) == 2
    assert [len(entry["choices"]) for entry in answers(target).values()] == [2, 2]

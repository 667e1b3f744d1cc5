"""The examples, and what the README tells a newcomer to do, executed against a running stack."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from tests.e2e.help_files import write_program
from tests.guard import documents

from weir.client import GenerateOptions, WeirClient
from weir.core.errors import WeirError
from weir.testing.stack import Stack, wait_until

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "shared" / "examples"
README = ROOT / "README.md"
of_stack = pytest.mark.stack


def run(*command: str, environ: dict[str, str] | None = None, text: str = "") -> str:
    """What a program printed; it must have ended well."""
    done = subprocess.run(
        command,
        env={**os.environ, **(environ or {})},
        input=text,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_example(name: str, *arguments: str) -> str:
    return run(sys.executable, str(EXAMPLES / name), *arguments)


@pytest.fixture
def weir_on_path(tmp_path: Path) -> dict[str, str]:
    return write_program(tmp_path)


@of_stack
def test_a_grpc_stream_over_raw_stubs(stack: Stack) -> None:
    printed = run_example("grpc_stream.py", stack.grpc_address)
    assert printed.startswith(" Paris.")
    assert printed.splitlines()[-1] == "24 tokens, FINISH_REASON_LENGTH"


@of_stack
def test_the_server_says_by_reflection_what_it_can_do(stack: Stack) -> None:
    printed = run_example("reflection.py", stack.grpc_address)
    assert {"weir.v1.Inference", "weir.v1.Admin", "grpc.health.v1.Health"} <= set(printed.splitlines())
    assert "  Generate(GenerateRequest) returns (stream GenerateResponse)" in printed
    with WeirClient(stack.grpc_address) as client:
        token_ids = client.tokenize("The capital of France is")
    assert json.loads(printed.splitlines()[-1]) == {"tokenIds": token_ids}


@of_stack
def test_openais_client(stack: Stack) -> None:
    printed = run_example("openai_client.py", f"{stack.http_url}/v1")
    assert "blue" in printed
    assert "\n24 tokens\n" in printed
    assert "refused: temperature: " in printed


@of_stack
def test_a_file_of_prompts_that_is_broken_off_and_gone_on_with(
    stack: Stack, weir_on_path: dict[str, str], tmp_path: Path
) -> None:
    accepted_before = stack.metric("gateway", "accepted_total")
    printed = run("sh", str(EXAMPLES / "offline_file.sh"), stack.grpc_address, str(tmp_path), environ=weir_on_path)
    answers = {answer["id"]: answer["text"] for answer in map(json.loads, printed.splitlines())}
    assert answers.keys() == {"france", "italy", "sum"}
    assert "Paris" in answers["france"]
    assert stack.metric("gateway", "accepted_total") - accepted_before == 3 + 2


@pytest.fixture
def limits_file(stack: Stack, limits_path: Path) -> Iterator[Path]:
    yield limits_path
    limits_path.write_text("")
    wait_until(lambda: is_open(stack), timeout_s=15, what="nobody needs a key any more")


def is_open(stack: Stack) -> bool:
    try:
        with WeirClient(stack.grpc_address, timeout_s=30) as client:
            return bool(list(client.generate("x", GenerateOptions(max_tokens=1))))
    except WeirError:
        return False


@of_stack
def test_two_tenants_with_a_key_each(stack: Stack, limits_file: Path) -> None:
    lines = run_example("lanes_and_tenants.py", stack.grpc_address, str(limits_file)).splitlines()
    who_and_what = [(line.split()[0], line.split()[1].split(":")[0]) for line in lines]
    assert who_and_what == [
        ("nobody", "Unauthenticated"),
        ("search", "served"),
        ("reports", "served"),
        ("reports", "PermissionDenied"),
        ("reports", "served"),
        ("reports", "QuotaExceeded"),
    ]


def test_a_policy_of_ones_own_is_installed_and_simulated(tmp_path: Path) -> None:
    pip = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index")
    run(*pip, "--target", str(tmp_path), str(EXAMPLES / "own_policy"))
    environ = {"PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(tmp_path)])}

    def weir(*arguments: str) -> str:
        return run(sys.executable, "-m", "weir.cli.main", *arguments, environ=environ)

    def mean_ttft_s(policy: str) -> float:
        load = ("--rate", "100", "--num-requests", "400", "--local", "1", "--max-num-seqs", "16")
        report = json.loads(weir("simulate", *load, "--policy", policy, "--json"))
        ttft: float = report["all"]["mean_ttft_s"]
        return ttft

    assert "longest-prompt: max_tokens: a whole number of at least 1, default 8192" in weir("policy", "list")
    assert mean_ttft_s("shortest-prompt") < mean_ttft_s("fcfs") < mean_ttft_s("longest-prompt")
    assert mean_ttft_s("longest-prompt:max_tokens=1") == mean_ttft_s("fcfs")


@of_stack
def test_what_the_readme_tells_a_newcomer_to_do(stack: Stack, weir_on_path: dict[str, str]) -> None:
    environ = {
        **weir_on_path,
        "WEIR_ADDRESS": stack.grpc_address,
        "WEIR_INSTANCE": stack.instance,
        "WEIR_RUNTIME_DIR": str(stack.runtime_dir),
    }
    # On a busy machine a process may be too slow to describe itself for a moment: status then ends with 1, rightly.
    is_well = ("status", "--instance", stack.instance)
    wait_until(lambda: stack.weir(*is_well).returncode == 0, timeout_s=60, what="the stack is well")
    said: dict[str, str] = {}
    for block in documents.blocks(README):
        for command in documents.commands(block) if block.language == "" else ():
            program, *arguments = command.words
            if program == ".venv/bin/weir":
                text = "What color is the sky on a clear day?\n/quit\n"
                own = ["--base-url", stack.http_url] if arguments[0] == "bench" else []
                said[arguments[0]] = run("weir", *arguments, *own, environ=environ, text=text)
            elif program == "curl":
                url, answer = curl(stack, arguments)
                said[url] = answer
    assert said.keys() == {"generate", "chat", "models", "status", "trace", "bench", "/v1/chat/completions", "/metrics"}
    assert "smollm2-135m" in said["models"]
    assert said["generate"].startswith(" Paris.")
    assert said["chat"].strip()
    assert said["status"].count(" ready ") >= 6
    assert json.loads(said["/v1/chat/completions"])["usage"]["completion_tokens"] > 0
    assert "longest: " in said["trace"]
    assert "weir_stage_seconds_bucket{" in said["/metrics"]
    assert "Successful requests:                    16" in said["bench"]
    shown = json.loads(run("weir", "status", "--json", environ=environ))
    assert {process["state"] for process in shown["processes"]} == {"ready"}


def curl(stack: Stack, arguments: list[str]) -> tuple[str, str]:
    """What a line of curl asks for, of this stack: (path, answer)."""
    path = next(word for word in arguments if word.startswith("http")).removeprefix("http://127.0.0.1:8000")
    headers = dict(pair.split(": ") for flag, pair in pairwise(arguments) if flag == "-H")
    body = arguments[arguments.index("-d") + 1] if "-d" in arguments else None
    method = "GET" if body is None else "POST"
    answer = httpx.request(method, f"{stack.http_url}{path}", content=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return path, answer.text


@of_stack
@pytest.mark.parametrize("document", [README, ROOT / "shared/docs/api.md"], ids=lambda path: path.name)
def test_the_programs_that_documents_show_run(stack: Stack, document: Path) -> None:
    programs = [block.text for block in documents.blocks(document) if block.language == "python"]
    assert programs
    for program in programs:
        printed = run(sys.executable, "-c", program.replace("127.0.0.1:50051", stack.grpc_address))
        assert printed.strip()

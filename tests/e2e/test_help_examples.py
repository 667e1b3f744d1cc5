"""Every example of every help text, typed into a shell as it is printed: those that need no stack here, the others
against one stack, and those that start a stack by themselves, of a tiny model.

What is appended makes a run small, or names ports that are free: the last of several equal options counts.
"""

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.help_files import MODEL, write_files, write_predictor, write_program
from tests.guard.help_texts import examples_of_help

from weir.client import GenerateOptions, WeirClient
from weir.core.addresses import free_port
from weir.testing.stack import Stack, wait_until

of_stack = pytest.mark.stack

ALONE: Mapping[str, str] = {
    "weir doctor": "",
    "weir doctor --json": "",
    "weir pull smollm2-135m": "",
    "weir models": "",
    "weir models --json": "",
    "weir serve decode --help": "",
    "weir limits check limits.toml": "",
    "weir up --hosts hosts.toml --model smollm2-135m": "",
    "weir limits key": "",
    "weir limits key --digest < key.txt": "",
    "weir simulate azure_2023_code.csv --local 2": "",
    "weir simulate azure_2023_code.csv --prefill 1 --decode 1 --rate 8 --arrivals poisson --ttft-ms 500": "",
    "weir simulate --rate 10 --num-requests 2000 --local 1 --policy shortest-prompt --json": "",
    "weir simulate trace.csv --profile measured.yaml": "",
    "weir simulate events.jsonl --local 1": "",
    "weir plan azure_2023_code.csv --profile h100-llama3-8b --ttft-ms 500 --gap-ms 100 --rate 20": "",
    "weir plan capture.jsonl --profile measured.yaml --ttft-ms 2000 --max-gpus 8 --json": "",
    "weir profile --out measured.yaml": f"--model {MODEL} --rounds 1 --num-threads 1",
    "weir bench simulator --load chat --rounds 5": "--num-requests 100 --rounds 1",
    "weir bench scheduler --policy fcfs --policy ltr --queued 10000": "--num-decisions 100 --pairs 1",
    "weir bench scheduler --policy fcfs --queued 10000 --pairs 64 --news-per-s 10": "--num-decisions 100 --pairs 2",
    "weir simulate --rate 10 --num-requests 2000 --host 2+0 --host 0+2 --host-gbit 100": "--num-requests 200",
    "weir bench batching --lengths lengths.csv": f"--model {MODEL} --num-jobs 4 --rounds 1 --num-threads 1",
    "weir train-predictor requests.jsonl.1 requests.jsonl --out lengths.npz": f"--model {MODEL}",
}
"""example -> what is appended."""

CERTIFICATES = (
    "weir certs ca certs",
    "weir certs issue certs --role decode --host gpu-1",
    "weir certs issue certs --role gateway --host front-1 --days 30 --force",
    "weir certs issue certs --role public --host localhost --host 127.0.0.1",
    "weir certs show certs/decode-gpu-1.pem",
)
"""In the order in which they are run, in one folder."""

STARTS_TWO_PAIRS = "weir up --prefill 2 --decode 2 --grpc-port 50052 --http-port 8001"
ON_STACK: Mapping[str, str] = {
    "weir status": "",
    "weir status --json": "",
    'weir generate --temperature 0 --max-tokens 24 "The capital of France is"': "",
    'weir generate --n 3 --temperature 0.8 --frequency-penalty 0.5 --seed 1 "Once upon a time"': "--max-tokens 16",
    'weir generate --timeout-s 2 --partial-at-deadline --json "Once upon a time"': "",
    'weir generate --chat --tools tools.json --tool-choice required "What is the weather in Paris?"': (
        "--tool-choice none --max-tokens 8"  # the built-in model's template shows no tools
    ),
    "weir generate --input prompts.jsonl --output answers.jsonl --max-tokens 64": "",
    "weir trace --last": "",
    "weir trace --slowest --json": "",
    "weir batch submit batch.jsonl": "",
    "weir batch submit batch.jsonl --completion-window 2h --json": "",
    "weir batch list": "",
    "weir batch list --limit 100 --json": "",
    "weir batch cancel batch_8f3a": "",
    "weir batch status batch_8f3a --wait": "",
    "weir batch fetch batch_8f3a --wait --output batch_answers.jsonl": "",
    "weir chat": "",
    'weir chat --system "Answer in one sentence." --temperature 0': "",
    "weir bench prefix --num-chats 50": "--num-chats 1 --answer-tokens 4 --num-sharing 2 --shared-tokens 32",
    "weir bench serve --max-concurrency 32 --random-input-len 128 --random-output-len 64": "{http} --num-prompts 8",
    "weir bench serve --request-rate 4 --burstiness 0.5 --goodput ttft:500 tpot:50 --metric-percentiles 50,90,99": (
        "{http} --num-prompts 8 --request-rate 40"
    ),
    "weir bench serve --backend grpc-chat --dataset-name multi_turn --num-prompts 40 --request-rate 2": (
        "--base-url {grpc} --num-prompts 6 --request-rate 40 --multi-turn-output-len 8"
    ),
    "weir bench serve --sweep-request-rates 1,2,4,8 --server a=http://10.0.0.1:8000 --server b=http://10.0.0.2:8000": (
        "--sweep-request-rates 40,80 --num-prompts 8 --random-input-len 32 --random-output-len 8"
    ),
    "weir bench serve --lane-mix interactive=0.2,batch=0.8 --tenant-mix a=1,b=3 --api-keys keys.txt": (
        "{http} --num-prompts 8"
    ),
    "weir bench serve --trace azure_2023_code.csv --num-prompts 100 --time-scale 4 --prompt-scale 16": (
        "{http} --num-prompts 8 --time-scale 0"
    ),
    "weir bench lanes --rounds 3": (
        "{http} --rounds 1 --num-flood 4 --flood-output-len 4 --num-urgent 2 --urgent-rate 20"
    ),
    "weir audit --out events.jsonl": "",
    "weir audit --changes": "",
    "weir profile --live": "",
    "weir limits show": "",
    "weir limits show --toml > limits.toml": "",
    "weir limits set lanes.batch.max_queued=100 tenants.acme.requests_per_min=60": "",
    "weir limits set tenants.acme.lanes='[\"batch\"]' lanes.batch.max_output_tokens=256": "",
    'weir generate --regex "1[0-9]{3}" "Columbus reached America in "': "",
    "weir limits set workers.decode.max_num_seqs=16 workers.prefill-0.max_num_batched_tokens=512": "",
    "weir planner tune --revert": "",
    "weir policy set ltr": "",
    "weir policy set srtf:max_age=0.5": "",
    "weir serve scheduler --nats-url nats://127.0.0.1:4222": "",
    "weir models add fast --model smollm2-135m --precision int8 --arena-bytes 256MiB --alias small": "",
    "weir models remove fast --grace-s 60": "",
    "weir drain decode-1 --wait": "",
    "weir drain decode-1 --undo": "",
    "weir role decode-1 prefill --wait": "",
    "weir restart --rolling prefill-0 decode-0 decode-1": "",
    "weir restart --rolling": "",
    "weir down --instance weir-50052": "",
}
"""In the order in which they are run: the later ones change the stack."""

STARTS: Mapping[str, str] = {
    "weir up": "",
    "weir up --gateways 2 --schedulers 2": "--detach",
    "weir up --limits-file limits.toml --policy ltr": "--detach",
    "WEIR_PREDICTOR=lengths.npz weir up --policy ltr": "--detach",
    "weir up --detach && weir status": "",
    "weir up --load dummy --model-shape llama-3.2-1b": "--detach",
    "weir up --chat-template hermes": "--detach",
    "weir down": "",
}

ABSENT: Mapping[str, str] = {
    "weir up --device cuda --exact": "a GPU",
    "weir up --device cuda --model ./Llama-3.1-8B-Instruct --arena-bytes 16GiB": "a GPU, and files of a gated model",
    "weir pull Qwen/Qwen2.5-0.5B-Instruct": "the hub",
    "weir pull Qwen/Qwen2.5-0.5B-Instruct-GGUF:qwen2.5-0.5b-instruct-q4_0.gguf": "the hub",
    "weir up --model Qwen/Qwen2.5-0.5B-Instruct": "the hub",
    "weir up --public-tls-cert certs/public-localhost.pem --public-tls-key certs/public-localhost.key": (
        "these files; tests/e2e/test_tls_up.py has its own"
    ),
    "weir drain --host 10.0.0.2 --wait": "other hosts; tests/hosts has some",
    "weir planner --ttft-ms 1000 --itl-ms 100": "somebody who ends it; tests/e2e/test_planner.py does",
    "weir planner switch --metrics-port 9464": "somebody who ends it; tests/e2e/test_planner.py does",
    "weir planner tune --tune decode.max_num_seqs=4,32 --apply": (
        "somebody who ends it; tests/e2e/test_planner_tune.py does"
    ),
    "weir planner scale --metrics-port 9464 --gateway http://10.0.0.7:8000 --scheduler 10.0.0.8:50051": "another stack",
    "weir host --join tls://10.0.0.1:4222 --instance lab --address 10.0.0.2 --credentials-dir lab/b": (
        "other hosts; tests/hosts has some"
    ),
    "weir host --join nats://10.0.0.1:4222 --instance lab --address 10.0.0.2 --insecure-listen --prefill 2": (
        "other hosts; tests/hosts has some"
    ),
    "weir top": "a terminal; tests/unit/cli/test_top.py drives it",
    "weir top --gateway http://10.0.0.7:8000 --interval-s 2": "that host",
    "weir bench serve --peer llama-server --peer-model smollm2-q4_0.gguf": "the program llama-server",
}
"""Why they are only parsed, which tests/guard/test_docs.py does with every example."""


_ELSEWHERE = (
    "weir up --chat-template hermes",
    "weir up --gateways 2 --schedulers 2",
    "weir up --detach && weir status",
    "weir up --limits-file limits.toml --policy ltr",
    "weir restart --rolling prefill-0 decode-0 decode-1",
    "weir models add fast --model smollm2-135m --precision int8 --arena-bytes 256MiB --alias small",
    "weir models remove fast --grace-s 60",
)
"""What they do is done by other tests too."""


def by_cost(example: str, *more: str) -> Any:
    """Weights of a billion numbers take a minute to draw and to pack."""
    is_long = "llama-3.2-1b" in example or example in _ELSEWHERE
    return pytest.param(example, *more, marks=pytest.mark.long if is_long else ())


def test_every_example_is_run_here_or_says_why_not() -> None:
    handled = [*ALONE, *CERTIFICATES, *ON_STACK, STARTS_TWO_PAIRS, *STARTS, *ABSENT]
    assert sorted(handled) == sorted(examples_of_help())


@dataclass(frozen=True)
class Shell:
    """Runs lines in a folder that has the files which examples name."""

    folder: Path
    environ: Mapping[str, str]

    def run(self, line: str, *, text: str = "", timeout_s: float = 580.0) -> str:
        """What it printed; it must have ended well."""
        done = subprocess.run(
            ["sh", "-c", line],
            cwd=self.folder,
            env=dict(self.environ),
            input=text,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
        assert done.returncode == 0, f"{line}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def start(self, line: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            ["sh", "-c", f"exec {line}"], cwd=self.folder, env=dict(self.environ), stdout=subprocess.PIPE, text=True
        )


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    folder = tmp_path_factory.mktemp("help")
    write_files(folder)
    unset = {name: value for name, value in os.environ.items() if not name.startswith("WEIR_")}
    cache = {name: value for name, value in os.environ.items() if name == "WEIR_CACHE"}
    own = {"WEIR_RUNTIME_DIR": str(folder / "run"), "TERM": "dumb", "COLUMNS": "200"}
    return Shell(folder, {**unset, **cache, **write_program(folder), **own})


@pytest.mark.parametrize(("example", "appended"), ALONE.items())
def test_an_example_that_needs_no_stack(shell: Shell, tmp_path: Path, example: str, appended: str) -> None:
    write_files(tmp_path)
    line, redirection, source = example.partition(" < ")
    alone = Shell(tmp_path, shell.environ)
    assert alone.run(f"{line} {appended}{redirection}{source}").strip()


def test_the_examples_of_certificates(shell: Shell, tmp_path: Path) -> None:
    alone = Shell(tmp_path, shell.environ)
    for example in CERTIFICATES:
        assert alone.run(example).strip(), example


@pytest.fixture(scope="module")
def pairs(shell: Shell) -> Iterator[Stack]:
    """Two prefill and two decode workers, started by the example that does so."""
    stack = Stack(shell.folder / "run")
    of_example = "--grpc-port 50052 --http-port 8001"
    assert STARTS_TWO_PAIRS.endswith(of_example)
    ports = f"--grpc-port {stack.grpc_port} --http-port {stack.http_port}"
    try:
        shell.run(
            f"WEIR_AUDIT=true {STARTS_TWO_PAIRS.replace(of_example, ports)} --instance {stack.instance} --detach",
            timeout_s=180,
        )
        yield stack
    finally:
        stack.stop()


@of_stack
@pytest.mark.parametrize(("example", "appended"), [by_cost(*one) for one in ON_STACK.items()])
def test_an_example_that_asks_a_stack(shell: Shell, pairs: Stack, example: str, appended: str) -> None:
    where = {"WEIR_ADDRESS": pairs.grpc_address, "WEIR_HTTP_URL": pairs.http_url, "WEIR_INSTANCE": pairs.instance}
    asking = Shell(shell.folder, {**shell.environ, **where})
    http = f"--base-url {pairs.http_url}"
    line = example.replace("weir-50052", pairs.instance)
    source = "long_batch.jsonl" if example.startswith("weir batch cancel") else "batch.jsonl"
    line = line.replace("batch_8f3a", f"$(weir batch submit {source})")
    line = line.replace("http://10.0.0.1:8000", pairs.http_url)
    line = line.replace("http://10.0.0.2:8000", f"grpc://{pairs.grpc_address}")
    command, redirection, target = f"{line} ".partition(" > ")
    line = f"{command} {appended.format(http=http, grpc=pairs.grpc_address)}{redirection}{target}"
    if example.startswith("weir serve scheduler"):
        known = Shell(shell.folder, {**asking.environ, "WEIR_NATS_SEED_FILE": pairs.nats_seed_file("scheduler")})
        serve_for_a_moment(known, line.replace("nats://127.0.0.1:4222", nats_url_of(pairs)), pairs.instance)
    elif example == "weir profile --live":
        run_live_profile(asking, line)
    elif example.startswith("weir status"):
        # on a busy machine a process may be too slow to describe itself for a moment
        wait_until(lambda: is_told(asking, line), timeout_s=60, what="the stack is well")
    else:
        asking.run(line, text="What color is the sky?\n/quit\n")


def is_told(shell: Shell, line: str) -> bool:
    try:
        return bool(shell.run(line))
    except AssertionError:
        return False


def run_live_profile(shell: Shell, line: str) -> None:
    """Costs, or why there are none: a worker that has served little cannot tell them."""
    done = shell.start(f"sh -c '{line} 2>&1'")
    printed, _ = done.communicate(timeout=60)
    if done.returncode == 0:
        assert "context_token_ms" in printed
    else:
        assert (done.returncode, "no worker has served steps that are various enough" in printed) == (1, True), printed


def nats_url_of(stack: Stack) -> str:
    return f"nats://{stack.status()['endpoints']['NATS'].removeprefix('nats://')}"


def serve_for_a_moment(shell: Shell, line: str, instance: str) -> None:
    """One more of the stack, whose NATS knows no other instance, until it is ready."""
    ready = shell.folder / "ready.json"
    with shell.start(f"{line} --instance {instance} --index 9 --ready-file {ready}") as served:
        wait_until(ready.exists, timeout_s=60, what="the scheduler is ready")
        served.send_signal(signal.SIGTERM)
        assert served.wait(30) == 0


@of_stack
@pytest.mark.timeout(640)
@pytest.mark.parametrize("example", [by_cost(example) for example in STARTS if example != "weir down"])
def test_an_example_that_starts_a_stack(shell: Shell, tmp_path: Path, example: str) -> None:
    write_files(tmp_path)
    if "lengths.npz" in example:
        write_predictor(tmp_path)
    grpc_port = free_port()
    of_model = {} if "--model-shape" in example else {"WEIR_LOAD": "dummy", "WEIR_MODEL_SHAPE": "tiny"}
    ports = {"WEIR_GRPC_PORT": str(grpc_port), "WEIR_HTTP_PORT": str(free_port())}
    starting = Shell(tmp_path, {**shell.environ, **of_model, **ports, "WEIR_RUNTIME_DIR": str(tmp_path / "run")})
    line = f"{example} {STARTS[example]}"
    try:
        if example == "weir up":
            run_in_the_foreground(starting, line, grpc_port)
        else:
            up, _, status = line.partition(" && ")
            starting.run(up, timeout_s=620)
            answer(grpc_port)
            if status:  # on a busy machine a process may be too slow to describe itself for a moment
                wait_until(lambda: is_told(starting, status), timeout_s=60, what="the stack is well")
    finally:
        starting.run("weir down")
    assert list((tmp_path / "run").glob("*/state.json")) == []


def run_in_the_foreground(shell: Shell, line: str, grpc_port: int) -> None:
    with shell.start(line) as started:
        assert started.stdout is not None
        ready = started.stdout.readline()
        answer(grpc_port)
        started.send_signal(signal.SIGINT)
        rest = started.stdout.read()
        assert started.wait(60) == 0, rest
    assert ready.startswith("ready after")


def answer(grpc_port: int) -> None:
    with WeirClient(f"127.0.0.1:{grpc_port}", timeout_s=60) as client:
        chunks = list(client.generate("The capital of France is", GenerateOptions(temperature=0, max_tokens=8)))
    assert sum(len(chunk.token_ids) for chunk in chunks) == 8

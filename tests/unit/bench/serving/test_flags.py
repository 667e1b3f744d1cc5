"""The flags of `weir bench serve`, as vLLM's command lines have them, and what they come to."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import typer.main

from weir.bench.serving.datasets import MultiTurn, PrefixRepetition, RandomPrompts, TraceReplay
from weir.bench.serving.flags import load_of, run_of, saving_of, sweep_of
from weir.bench.serving.sharegpt import ShareGpt
from weir.cli.app import app
from weir.cli.bench_serve import spread


def flags_of(line: str) -> Mapping[str, Any]:
    program: Any = typer.main.get_command(app)
    command = program.commands["bench"].commands["serve"]
    flags = command.make_context("serve", line.split()).params
    paths = ("dataset_path", "trace", "api_keys", "result_dir", "result_filename")
    return {name: Path(value) if name in paths and value else value for name, value in flags.items()}


def test_options_with_several_values_are_read_as_argparse_reads_them() -> None:
    line = "--goodput ttft:300 tpot:50 --seed 3 --metadata a=1 b=2 --goodput e2el:9 --save-result"
    assert " ".join(spread(line.split())) == (
        "--goodput ttft:300 --goodput tpot:50 --seed 3 --metadata a=1 --metadata b=2 --goodput e2el:9 --save-result"
    )
    assert list(spread(["--goodput", "--seed", "3"])) == ["--goodput", "--seed", "3"]


def test_a_command_line_of_vllm_is_understood() -> None:
    line = (
        "--backend vllm --host 10.0.0.1 --port 9000 --endpoint /v1/completions --model m --dataset-name random"
        " --random-input-len 100 --random-output-len 20 --random-range-ratio 0.2 --random-prefix-len 7 --num-prompts 9"
        " --request-rate 4 --burstiness 0.5 --max-concurrency 3 --ignore-eos --temperature 0.7 --top-p 0.9 --top-k 5"
        " --seed 2 --percentile-metrics ttft,itl --metric-percentiles 50,99.9 --goodput ttft:300 tpot:50"
        " --save-result --save-detailed --result-dir r --result-filename f.json --metadata v=1 w=2 --header x=y"
        " --disable-tqdm --num-warmups 3 --label mine"
    )
    flags = flags_of(line)
    load, run = load_of(flags), run_of(flags, load_of(flags))
    assert (load.base_url, load.path, load.model, load.num_prompts) == (
        "http://10.0.0.1:9000",
        "/v1/completions",
        "m",
        9,
    )
    assert load.dataset == RandomPrompts(100, 20, 0.2, 7)
    assert (load.arrivals.request_rate, load.arrivals.burstiness, load.max_concurrency) == (4.0, 0.5, 3)
    assert (load.temperature, load.extra_body, load.headers) == (0.7, {"top_p": 0.9, "top_k": 5}, {"x": "y"})
    assert run.reporting.goodput_ms == {"ttft": 300, "tpot": 50}
    assert (run.reporting.percentile_metrics, run.reporting.percentiles) == (("ttft", "itl"), (50, 99.9))
    assert (run.num_warmups, run.shows_progress) == (3, False)
    saving = saving_of(flags, load)
    assert (saving.path, saving.is_detailed, saving.label) == (Path("r/f.json"), True, "mine")
    assert saving.metadata == {"v": "1", "w": "2"}


def test_defaults_are_32_at_once_and_no_bound_where_requests_have_times(tmp_path: Path) -> None:
    load = load_of(flags_of(""))
    assert (load.base_url, load.max_concurrency, load.dataset) == ("http://127.0.0.1:8000", 32, RandomPrompts())
    assert load.arrivals.request_rate == math.inf
    assert load_of(flags_of("--request-rate 3")).max_concurrency is None
    ramp = "--ramp-up-strategy linear --ramp-up-start-rps 1 --ramp-up-end-rps 9"
    assert load_of(flags_of(ramp)).max_concurrency is None
    assert load_of(flags_of(f"--trace {tmp_path}/t.csv")).max_concurrency is None
    assert load_of(flags_of(f"--trace {tmp_path}/t.csv --no-self-timed")).max_concurrency == 32
    assert saving_of(flags_of(""), load).path is None
    named = saving_of(flags_of("--save-result --max-concurrency 8"), load_of(flags_of("--max-concurrency 8"))).path
    assert named is not None
    assert named.name.startswith("openai-infqps-concurrency8-smollm2-135m-")


def test_every_backend_has_its_address_and_its_endpoint() -> None:
    assert load_of(flags_of("--backend grpc")).base_url == "127.0.0.1:50051"
    assert load_of(flags_of("--backend grpc --base-url grpc://h:1")).base_url == "h:1"
    assert load_of(flags_of("--backend grpc-chat --port 7")).base_url == "127.0.0.1:7"
    assert load_of(flags_of("--endpoint-type openai-chat --host ::1")).base_url == "http://[::1]:8000"
    assert load_of(flags_of("--backend openai-chat")).path == "/v1/chat/completions"


def test_every_dataset_is_made_of_its_flags() -> None:
    repeated = load_of(flags_of("--dataset-name prefix_repetition --prefix-repetition-prefix-len 9 --output-len 5"))
    assert repeated.dataset == PrefixRepetition(9, 256, 10, 5)
    chats = load_of(flags_of("--backend grpc-chat --dataset-name multi_turn --multi-turn-num-turns 2 --input-len 3"))
    assert chats.dataset == MultiTurn(2, 64, 3, 64, 0.0)
    shared = load_of(flags_of("--dataset-name sharegpt --dataset-path s.json --sharegpt-output-len 6"))
    assert shared.dataset == ShareGpt(Path("s.json"), 6)
    traced = load_of(flags_of("--dataset-name azure --dataset-path a.csv --time-scale 0.5"))
    assert traced.dataset == TraceReplay(Path("a.csv"), 0.5, trace_format="azure")
    assert load_of(flags_of("--dataset-path a.csv")).dataset == TraceReplay(Path("a.csv"))


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--dataset-name sonnet", "dataset-name 'sonnet': must be one of"),
        ("--dataset-name azure", "azure: needs --dataset-path"),
        ("--dataset-name random --dataset-path x", "random reads no file"),
        ("--dataset-name random --trace x", "--trace is a trace"),
        ("--self-timed", "self-timed: random has no times"),
        ("--trace x.csv --request-rate 2", "the trace has times of its own"),
        ("--ramp-up-strategy linear", "needs ramp-up-start-rps and ramp-up-end-rps"),
        ("--ramp-up-end-rps 3", "need ramp-up-strategy"),
        ("--extra-body [1]", "extra-body: must be a JSON object"),
        ("--extra-body {", "extra-body: is not JSON"),
        ("--header nonsense", "header 'nonsense': must be KEY=VALUE"),
        ("--base-url 127.0.0.1:8000", "of backend openai it must be http"),
        ("--backend grpc --base-url http://h:1", "of backend grpc it must be HOST:PORT"),
        ("--random-range-ratio 1", "random-range-ratio 1.0"),
    ],
)
def test_flags_that_contradict_or_lack_something_are_named(line: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        load_of(flags_of(line))


def test_a_sweep_is_over_rates_or_concurrencies_of_one_server_or_several() -> None:
    flags = flags_of("--sweep-request-rates 1,2 --server a=http://h:1 b=grpc://h:2 --result-dir d")
    sweep = sweep_of(flags, load_of(flags))
    assert ([server.name for server in sweep.servers], sweep.axis, sweep.values) == (["a", "b"], "request_rate", (1, 2))
    assert (sweep.folder, sweep.load_at(sweep.servers[0], 2.0).max_concurrency) == (Path("d"), None)
    flags = flags_of("--sweep-concurrencies 1,8")
    sweep = sweep_of(flags, load_of(flags))
    assert (sweep.axis, sweep.folder) == ("max_concurrency", Path("bench-sweep"))
    assert sweep.load_at(sweep.servers[0], 8.0).max_concurrency == 8
    for line in ("--sweep-request-rates 1 --sweep-concurrencies 1", "--sweep-request-rates 1 --request-rate 2"):
        with pytest.raises(ValueError, match=r"a sweep (has one axis|over rates has its own)"):
            sweep_of(flags_of(line), load_of(flags_of(line)))

"""`weir bench serve`: a server under load as its clients see it; one run, a sweep, or a comparison."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from weir.cli import options
from weir.cli.console import need_extra

_MANY = frozenset({"--goodput", "--metadata", "--header", "--server"})
INFINITE = float("inf")


class ManyValues(TyperCommand):
    """Takes `--goodput ttft:300 tpot:50`, as argparse's programs do, as well as the option twice."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, list(spread(args)))


def spread(arguments: Sequence[str]) -> Iterator[str]:
    """The option again before each further value."""
    option, has_value = "", False
    for word in arguments:
        if word.startswith("-"):
            name, equals, _ = word.partition("=")
            option, has_value = (name, bool(equals)) if name in _MANY else ("", False)
        elif option:
            if has_value:
                yield option
            has_value = True
        yield word


def serve(
    backend: Annotated[
        Literal["openai", "vllm", "openai-chat", "grpc", "grpc-chat"],
        typer.Option("--backend", "--endpoint-type", help="Completions or chat, over HTTP or Weir's gRPC."),
    ] = "openai",
    base_url: Annotated[
        str, typer.Option(help="The server: Weir or any other. Default: http://127.0.0.1:8000; gRPC 127.0.0.1:50051.")
    ] = "",
    ca: options.Ca = "",
    host: Annotated[str, typer.Option(help="Instead of --base-url.")] = "",
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Instead of --base-url.")] = None,
    endpoint: Annotated[str, typer.Option(help="Path of HTTP requests. Default: the backend's.")] = "",
    model: Annotated[str, typer.Option(help="Model to ask for.")] = "smollm2-135m",
    dataset_name: Annotated[
        str,
        typer.Option(
            help="random, sharegpt, prefix_repetition, multi_turn, or a trace: azure, mooncake, aibrix, arena, capture"
            " (own logs), trace (any of them). Default: random, with a path trace."
        ),
    ] = "",
    dataset_path: Annotated[Path | None, typer.Option(help="File of a trace or of ShareGPT.")] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests in all.")] = 64,
    input_len: Annotated[int | None, typer.Option(min=1, help="Prompts of any dataset that draws them.")] = None,
    output_len: Annotated[int | None, typer.Option(min=1, help="Answers of any dataset but traces.")] = None,
    random_input_len: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 128,
    random_output_len: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 64,
    random_range_ratio: Annotated[float, typer.Option(help="Lengths lie this share around those; [0, 1).")] = 0.0,
    random_prefix_len: Annotated[int, typer.Option(min=0, help="Tokens before every prompt, the same.")] = 0,
    sharegpt_output_len: Annotated[int | None, typer.Option(min=1, help="Default: as in the file.")] = None,
    prefix_repetition_prefix_len: Annotated[int, typer.Option(min=1)] = 256,
    prefix_repetition_suffix_len: Annotated[int, typer.Option(min=1)] = 256,
    prefix_repetition_num_prefixes: Annotated[int, typer.Option(min=1)] = 10,
    prefix_repetition_output_len: Annotated[int, typer.Option(min=1)] = 128,
    multi_turn_num_turns: Annotated[int, typer.Option(min=1, help="Of a chat; each is a request.")] = 4,
    multi_turn_system_len: Annotated[int, typer.Option(min=0, help="Words of a system prompt.")] = 64,
    multi_turn_user_len: Annotated[int, typer.Option(min=1, help="Words of a turn.")] = 64,
    multi_turn_output_len: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 64,
    multi_turn_pause_s: Annotated[float, typer.Option(min=0, help="Mean, between answer and next turn.")] = 0.0,
    trace: Annotated[Path | None, typer.Option(help="As --dataset-path, of a trace.")] = None,
    self_timed: Annotated[
        bool | None, typer.Option("--self-timed/--no-self-timed", help="A trace at its times, or only its lengths.")
    ] = None,
    time_scale: Annotated[float, typer.Option(min=0, help="Of a trace's times; 0.1: ten times faster.")] = 1.0,
    prompt_scale: Annotated[float, typer.Option(min=0.01, help="A file's prompts are this many times shorter.")] = 1.0,
    output_scale: Annotated[float, typer.Option(min=0.01, help="A file's answers are this many times shorter.")] = 1.0,
    prompt_form: Annotated[
        Literal["ids", "text"], typer.Option(help="Prompts as token ids, or as words of about a token each.")
    ] = "ids",
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests in flight. Default: 32; with a rate or a trace all that come.")
    ] = None,
    request_rate: Annotated[float, typer.Option(min=0.001, help="Arrivals a second; inf: all at once.")] = INFINITE,
    burstiness: Annotated[
        float, typer.Option(help="Shape of gamma gaps: 1 Poisson, below 1 in bunches, above it evener.")
    ] = 1.0,
    burst_size: Annotated[int, typer.Option(min=1, help="Requests at each arrival, at the same rate.")] = 1,
    ramp_up_strategy: Annotated[
        Literal["linear", "exponential"] | None, typer.Option(help="A rate that rises, instead of --request-rate.")
    ] = None,
    ramp_up_start_rps: Annotated[float | None, typer.Option()] = None,
    ramp_up_end_rps: Annotated[float | None, typer.Option()] = None,
    num_warmups: Annotated[int, typer.Option(min=0, help="Requests before the measured ones.")] = 0,
    ready_check_timeout_sec: Annotated[float, typer.Option(min=0, help="Wait so long for a first answer.")] = 0.0,
    timeout_s: Annotated[float, typer.Option(min=0.001, help="Of one whole answer.")] = 600.0,
    temperature: Annotated[float, typer.Option(min=0, max=2)] = 0.0,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    frequency_penalty: options.FrequencyPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts, lengths and arrivals.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos/--no-ignore-eos", help="Answers of full length.")] = True,
    extra_body: Annotated[str, typer.Option(help="JSON object of more fields of each request.")] = "",
    header: Annotated[list[str] | None, typer.Option(help="KEY=VALUE of HTTP, several.")] = None,
    request_id_prefix: Annotated[str, typer.Option(help="Requests say ids: this and their number.")] = "",
    percentile_metrics: Annotated[str, typer.Option(help="What is printed.")] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[str, typer.Option(help="Which of them: 50,90,99.")] = "99",
    goodput: Annotated[
        list[str] | None, typer.Option(help="Targets in ms that a good request keeps: ttft:300 tpot:50 e2el:5000.")
    ] = None,
    save_result: Annotated[bool, typer.Option("--save-result", help="Write the JSON to a file.")] = False,
    save_detailed: Annotated[bool, typer.Option("--save-detailed", help="With a list of each request.")] = False,
    result_dir: Annotated[
        Path | None, typer.Option(help="Folder of what is written; of a sweep, by default, bench-sweep.")
    ] = None,
    result_filename: Annotated[Path | None, typer.Option(help="Write the JSON here.")] = None,
    metadata: Annotated[list[str] | None, typer.Option(help="KEY=VALUE of the JSON, several.")] = None,
    label: Annotated[str, typer.Option(help="Of the run, in the JSON.")] = "",
    disable_tqdm: Annotated[bool, typer.Option("--disable-tqdm", help="No progress bar.")] = False,
    sweep_request_rates: Annotated[str, typer.Option(help="Once at each rate, and a curve: 1,2,4,8.")] = "",
    sweep_concurrencies: Annotated[str, typer.Option(help="Once with so many in flight, and a curve: 1,8,32.")] = "",
    server: Annotated[
        list[str] | None, typer.Option(help="With a sweep: NAME=URL or NAME=URL#MODEL, several; grpc:// for gRPC.")
    ] = None,
    lane_mix: Annotated[str, typer.Option(help="Lanes and their shares: interactive=0.2,batch=0.8.")] = "",
    tenant_mix: Annotated[str, typer.Option(help="Tenants and their shares: a=1,b=3; see --api-keys.")] = "",
    api_keys: Annotated[Path | None, typer.Option(help="File of the tenants' keys, NAME=KEY a line.")] = None,
    api_key: options.ApiKey = "",
    peer: Annotated[str, typer.Option(help="Compare with llama-server or vllm, in turns.")] = "",
    peer_binary: Annotated[str, typer.Option(help="Program of --peer llama-server.")] = "llama-server",
    peer_model: Annotated[Path | None, typer.Option(help="GGUF file that --peer llama-server serves.")] = None,
    peer_url: Annotated[str, typer.Option(help="A peer that runs already.")] = "",
    shapes: Annotated[str, typer.Option(help="With --peer: tokens in/out, instead of the lengths above.")] = (
        "128/64,16/128,512/128"
    ),
    concurrencies: Annotated[str, typer.Option(help="With --peer: requests in flight.")] = "1,8,32",
    rounds: Annotated[int, typer.Option(min=1, help="With --peer: turns of each side.")] = 3,
    as_json: options.AsJson = False,
) -> None:
    """Load a server as its clients would. Flags, block and JSON keys are those of `vllm bench serve`.

    \b
    weir bench serve --max-concurrency 32 --random-input-len 128 --random-output-len 64
    weir bench serve --request-rate 4 --burstiness 0.5 --goodput ttft:500 tpot:50 --metric-percentiles 50,90,99
    weir bench serve --backend grpc-chat --dataset-name multi_turn --num-prompts 40 --request-rate 2
    weir bench serve --sweep-request-rates 1,2,4,8 --server a=http://10.0.0.1:8000 --server b=http://10.0.0.2:8000
    weir bench serve --lane-mix interactive=0.2,batch=0.8 --tenant-mix a=1,b=3 --api-keys keys.txt
    weir bench serve --trace azure_2023_code.csv --num-prompts 100 --time-scale 4 --prompt-scale 16
    weir bench serve --peer llama-server --peer-model smollm2-q4_0.gguf
    """
    flags = locals()
    if sweep_request_rates or sweep_concurrencies:
        need_extra("plots", "weir bench serve with a sweep")
    try:
        if sweep_request_rates or sweep_concurrencies:
            raise typer.Exit(_swept(flags))
        raise typer.Exit(_compared(flags) if peer else _served(flags))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _served(flags: Mapping[str, Any]) -> int:
    from weir.bench.serving.flags import load_of, run_of, saving_of
    from weir.bench.serving.serve import main

    load = load_of(flags)
    return main(run_of(flags, load), saving_of(flags, load), json_output=flags["as_json"])


def _swept(flags: Mapping[str, Any]) -> int:
    from weir.bench.serving.flags import load_of, sweep_of
    from weir.bench.serving.sweep import main

    return main(sweep_of(flags, load_of(flags)), json_output=flags["as_json"])


def _compared(flags: Mapping[str, Any]) -> int:
    from weir.bench.serving.flags import load_of
    from weir.bench.serving.peers import main, parse_comparison

    comparison = parse_comparison(load_of(flags), flags["shapes"], flags["concurrencies"], flags["rounds"])
    return main(
        comparison,
        flags["peer"],
        binary=flags["peer_binary"],
        model_path=flags["peer_model"],
        peer_url=flags["peer_url"],
        out=flags["result_filename"],
    )

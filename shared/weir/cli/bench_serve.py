"""`weir bench serve`: a server as its clients see it."""

from pathlib import Path
from typing import Annotated

import typer

from weir.cli import options


def serve(
    base_url: Annotated[str, typer.Option(help="An OpenAI-style server: Weir or any other.")] = "http://127.0.0.1:8000",
    endpoint: Annotated[str, typer.Option(help="Path of its completions.")] = "/v1/completions",
    model: Annotated[str, typer.Option(help="Model to ask for.")] = "smollm2-135m",
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests in all.")] = 64,
    random_input_len: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 128,
    random_output_len: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 64,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests in flight. Default: 32; of a trace all that come.")
    ] = None,
    request_rate: Annotated[
        float, typer.Option(min=0.001, help="Poisson arrivals a second; inf: all at once.")
    ] = float("inf"),
    temperature: Annotated[float, typer.Option(min=0, max=2)] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the random prompts and arrivals.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos/--no-ignore-eos", help="Answers of full length.")] = True,
    result_filename: Annotated[Path | None, typer.Option(help="Also write the JSON here.")] = None,
    lane_mix: Annotated[str, typer.Option(help="Lanes and their shares: interactive=0.2,batch=0.8.")] = "",
    tenant_mix: Annotated[str, typer.Option(help="Tenants and their shares: a=1,b=3; see --api-keys.")] = "",
    api_keys: Annotated[Path | None, typer.Option(help="File of the tenants' keys, NAME=KEY a line.")] = None,
    api_key: options.ApiKey = "",
    trace: Annotated[
        Path | None, typer.Option(help="Replay a trace: Azure, Mooncake, ShareGPT, own captures …")
    ] = None,
    time_scale: Annotated[float, typer.Option(min=0, help="Of a trace's times; 0.1: ten times faster.")] = 1.0,
    prompt_scale: Annotated[float, typer.Option(min=0.01, help="A trace's prompts are this many times shorter.")] = 1.0,
    output_scale: Annotated[float, typer.Option(min=0.01, help="A trace's answers are this many times shorter.")] = 1.0,
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
    """Load a server over HTTP as its clients would. Flags, block and JSON keys are those of `vllm bench serve`.

    \b
    weir bench serve --max-concurrency 32 --random-input-len 128 --random-output-len 64
    weir bench serve --lane-mix interactive=0.2,batch=0.8 --tenant-mix a=1,b=3 --api-keys keys.txt
    weir bench serve --trace azure_2023_code.csv --num-prompts 100 --time-scale 4 --prompt-scale 16
    weir bench serve --peer llama-server --peer-model smollm2-q4_0.gguf
    """
    from weir.bench.serving.api_keys import check_keys, read_keys
    from weir.bench.serving.jobs import Mix, TraceReplay
    from weir.bench.serving.load import LoadConfig
    from weir.bench.serving.peers import main as bench_peers
    from weir.bench.serving.peers import parse_comparison
    from weir.bench.serving.serve import main as bench_serve

    try:
        config = LoadConfig(
            base_url=base_url,
            endpoint=endpoint,
            model=model,
            num_prompts=num_prompts,
            input_len=random_input_len,
            output_len=random_output_len,
            max_concurrency=max_concurrency or (32 if trace is None else num_prompts),
            request_rate=request_rate,
            temperature=temperature,
            seed=seed,
            ignore_eos=ignore_eos,
            trace=None if trace is None else TraceReplay(trace, time_scale, prompt_scale, output_scale),
            lanes=Mix.parse(lane_mix),
            tenants=Mix.parse(tenant_mix),
            api_keys=read_keys(api_keys, api_key),
        )
        check_keys(config)
        if not peer:
            raise typer.Exit(bench_serve(config, json_output=as_json, result_path=result_filename))
        comparison = parse_comparison(config, shapes, concurrencies, rounds)
        raise typer.Exit(
            bench_peers(
                comparison, peer, binary=peer_binary, model_path=peer_model, peer_url=peer_url, out=result_filename
            )
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error

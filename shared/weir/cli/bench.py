"""`weir bench`: what this machine and a running stack can do."""

from pathlib import Path
from typing import Annotated

import typer

from weir.cli import options
from weir.cli.console import need_extra
from weir.core.device import PRECISION_HELP, Precision

app = typer.Typer(help="Measure. Figures depend on the machine and on what else runs on it.", no_args_is_help=True)


@app.command()
def step(
    model: Annotated[str, typer.Option(help="Known name, GGUF file or Hugging Face folder.")] = "smollm2-135m",
    num_threads: Annotated[int | None, typer.Option(min=1, help="Threads of the forward pass. Default: cores.")] = None,
    precision: Annotated[Precision, typer.Option(help=PRECISION_HELP)] = "auto",
    as_json: options.AsJson = False,
) -> None:
    """Tokens/s of prefill, and of decode at 1, 8 and 32 sequences: the engine alone, in this process."""
    need_extra("worker", "weir bench step")
    from weir.bench.step import main as bench_step

    raise typer.Exit(bench_step(model, as_json, num_threads, precision))


@app.command()
def quality(
    text: Annotated[Path, typer.Option(help="Plain text to predict; 100 KB take a minute.")],
    model: Annotated[str, typer.Option(help="Known name, GGUF file or Hugging Face folder.")] = "smollm2-135m",
    max_tokens: Annotated[int | None, typer.Option(min=2, help="Only the beginning of the text.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """What int8 costs in quality: perplexity of a text in int8 beside fp32."""
    need_extra("worker", "weir bench quality")
    from weir.bench.quality import main as bench_quality

    raise typer.Exit(bench_quality(model, text, as_json, max_tokens))


@app.command()
def transfer(
    repeats: Annotated[int, typer.Option(min=1, help="Hand-offs of each size.")] = 200,
    as_json: options.AsJson = False,
) -> None:
    """Time of a hand-off of 100 and of 4,000 tokens, beside the time of copying the same pages."""
    from weir.bench.transfer import main as bench_transfer

    raise typer.Exit(bench_transfer(json_output=as_json, repeats=repeats))


@app.command()
def prefix(
    address: options.Address = options.DEFAULT_ADDRESS,
    model: Annotated[str, typer.Option(help="Model that the stack serves.")] = "smollm2-135m",
    num_chats: Annotated[int, typer.Option(min=0, help="Chats of two turns, one after the other.")] = 50,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Longest first answer.")] = 96,
    num_sharing: Annotated[int, typer.Option(min=1, help="Requests at one time that share a prefix.")] = 32,
    shared_tokens: Annotated[int, typer.Option(min=16, help="Tokens of that prefix.")] = 512,
    seed: Annotated[int, typer.Option(help="Of the texts.")] = 0,
    as_json: options.AsJson = False,
) -> None:
    """What the prefix cache of a running stack saves: second turns of chats, and prefixes that many share.

    \b
    weir bench prefix --num-chats 50
    """
    from weir.bench.prefix import PrefixConfig
    from weir.bench.prefix import main as bench_prefix

    config = PrefixConfig(address, model, num_chats, answer_tokens, num_sharing, shared_tokens, seed)
    raise typer.Exit(bench_prefix(config, as_json=as_json))


@app.command()
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
    from weir.bench.serving.jobs import Mix, TraceReplay
    from weir.bench.serving.load import LoadConfig, check_keys, read_keys
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


@app.command()
def lanes(
    base_url: Annotated[str, typer.Option(help="A running stack's HTTP port.")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Model that the stack serves.")] = "smollm2-135m",
    num_flood: Annotated[int, typer.Option(min=1, help="Requests that come at once in the lane batch.")] = 96,
    flood_output_len: Annotated[int, typer.Option(min=1, help="Tokens of their answers.")] = 96,
    num_urgent: Annotated[int, typer.Option(min=1, help="Requests that arrive while those are served.")] = 20,
    urgent_rate: Annotated[float, typer.Option(min=0.001, help="Their Poisson arrivals a second.")] = 1.0,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each kind, in turns.")] = 3,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    api_key: options.ApiKey = "",
    out: Annotated[Path | None, typer.Option(dir_okay=False, help="Also write the table here, as Markdown.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """How long urgent requests wait for their first token under a flood: in a lane of their own, and in the flood's.

    \b
    weir bench lanes --rounds 3
    """
    from weir.bench.serving.lanes import LanesConfig
    from weir.bench.serving.lanes import main as bench_lanes

    config = LanesConfig(
        base_url,
        model,
        num_flood=num_flood,
        flood_output_len=flood_output_len,
        num_urgent=num_urgent,
        urgent_rate=urgent_rate,
        rounds=rounds,
        seed=seed,
        api_key=api_key,
    )
    raise typer.Exit(bench_lanes(config, json_output=as_json, out=out))


@app.command()
def simulator(
    load: Annotated[list[str] | None, typer.Option(help="arena, code or chat; repeat it. Default: all.")] = None,
    num_requests: Annotated[int, typer.Option(min=1, help="Of each simulation.")] = 2000,
    rounds: Annotated[int, typer.Option(min=1, help="Simulations of each kind, in turns.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the choice of lengths, and of the arrivals.")] = 0,
    as_json: options.AsJson = False,
) -> None:
    """Simulated requests a minute, step-exact and with fast-forward, whose results must be equal.

    Lengths are those of public traces in the folder `traces` of WEIR_TEST_DATA, or without them generated.

    \b
    weir bench simulator --load chat --rounds 5
    """
    from weir.bench.simulator import LOADS, SimulatorBenchConfig
    from weir.bench.simulator import main as bench_simulator

    if unknown := set(load or ()).difference(LOADS):
        raise typer.BadParameter(f"--load {', '.join(sorted(unknown))}: must be {', '.join(LOADS)}")
    config = SimulatorBenchConfig(tuple(load or LOADS), num_requests, rounds, seed)
    raise typer.Exit(bench_simulator(config, as_json=as_json))


@app.command()
def scheduler(
    policy: Annotated[list[str] | None, typer.Option(help="Only these; repeat it for several. Default: all.")] = None,
    queued: Annotated[list[int] | None, typer.Option(help="Requests that wait. Default: 100, 1000, 10000.")] = None,
    pairs: Annotated[list[int] | None, typer.Option(help="Pairs of workers. Default: 1, 16.")] = None,
    num_decisions: Annotated[int, typer.Option(min=100, help="Of each run.")] = 5000,
    seed: Annotated[int, typer.Option(help="Of the requests.")] = 0,
    as_json: options.AsJson = False,
) -> None:
    """What a decision costs the scheduler: one arrival, one end, one pick; microseconds, beside a constant loop.

    \b
    weir bench scheduler --policy fcfs --policy ltr --queued 10000
    """
    from weir.bench.scheduler import SchedulerBenchConfig
    from weir.bench.scheduler import main as bench_scheduler
    from weir.policy.registry import policy_names

    config = SchedulerBenchConfig(
        policies=tuple(policy or policy_names()),
        queued=tuple(queued or (100, 1000, 10_000)),
        pairs=tuple(pairs or (1, 16)),
        num_decisions=num_decisions,
        seed=seed,
    )
    raise typer.Exit(bench_scheduler(config, as_json=as_json))


@app.command()
def batching(
    lengths: Annotated[
        Path, typer.Option(envvar="WEIR_BENCH_LENGTHS", help="CSV of prompt and output lengths, one request a row.")
    ],
    model: Annotated[str, typer.Option(help="Known name, GGUF file or Hugging Face folder.")] = "smollm2-135m",
    precision: Annotated[Precision, typer.Option(help=PRECISION_HELP)] = "auto",
    num_jobs: Annotated[int, typer.Option(min=1, help="Requests of a run.")] = 96,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences in the batch.")] = 32,
    prompt_scale: Annotated[float, typer.Option(min=0.01, help="Prompts are this many times shorter.")] = 32.0,
    output_scale: Annotated[float, typer.Option(min=0.01, help="Answers are this many times shorter.")] = 8.0,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each rule, in turns.")] = 3,
    load: Annotated[float, typer.Option(min=0.01, help="Poisson arrivals, as share of what was served at once.")] = 0.7,
    window_ms: Annotated[float, typer.Option(min=1, help="Window of dynamic batching.")] = 50.0,
    num_threads: Annotated[int, typer.Option(min=1, help="Threads of the forward pass.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the choice of rows, the prompts and the arrivals.")] = 0,
    as_json: options.AsJson = False,
) -> None:
    """Continuous batching against static and dynamic batches: same engine, same requests, real steps.

    \b
    weir bench batching --lengths lengths.csv
    """
    need_extra("worker", "weir bench batching")
    from weir.bench.batching import BatchingConfig
    from weir.bench.batching import main as bench_batching

    config = BatchingConfig(
        model=model,
        lengths_path=lengths,
        precision=precision,
        num_jobs=num_jobs,
        max_num_seqs=max_num_seqs,
        prompt_scale=prompt_scale,
        output_scale=output_scale,
        rounds=rounds,
        load=load,
        window_ms=window_ms,
        num_threads=num_threads,
        seed=seed,
    )
    raise typer.Exit(bench_batching(config, json_output=as_json))

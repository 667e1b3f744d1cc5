"""`weir bench`: what this machine and a running stack can do."""

from pathlib import Path
from typing import Annotated

import typer

from weir.cli import bench_serve, options
from weir.cli.console import need_extra
from weir.core.device import PRECISION_HELP, Precision

app = typer.Typer(help="Measure. Figures depend on the machine and on what else runs on it.", no_args_is_help=True)
app.command(cls=bench_serve.ManyValues)(bench_serve.serve)


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
    news_per_s: Annotated[
        float, typer.Option(min=0, help="Of each pair's arena, of what it has cached; hosts exchange pages then.")
    ] = 0.0,
    num_decisions: Annotated[int, typer.Option(min=100, help="Of each run.")] = 5000,
    seed: Annotated[int, typer.Option(help="Of the requests.")] = 0,
    as_json: options.AsJson = False,
) -> None:
    """What a decision costs the scheduler: one arrival, one end, one pick; microseconds, beside a constant loop.

    \b
    weir bench scheduler --policy fcfs --policy ltr --queued 10000
    weir bench scheduler --policy fcfs --queued 10000 --pairs 64 --news-per-s 10
    """
    from weir.bench.scheduler import SchedulerBenchConfig
    from weir.bench.scheduler import main as bench_scheduler
    from weir.policy.registry import policy_names

    config = SchedulerBenchConfig(
        policies=tuple(policy or policy_names()),
        queued=tuple(queued or (100, 1000, 10_000)),
        pairs=tuple(pairs or (1, 16)),
        news_a_second=news_per_s,
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

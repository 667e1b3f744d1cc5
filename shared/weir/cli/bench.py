"""`weir bench`: what this machine and a running stack can do."""

from pathlib import Path
from typing import Annotated

import typer

from weir.cli import bench_lanes, bench_serve, bench_simulator, options
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
    from weir.bench.step.bench import main as bench_step

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


app.command()(bench_serve.serve)
app.command()(bench_lanes.lanes)
app.command()(bench_simulator.simulator)


@app.command()
def scheduler(
    policy: Annotated[list[str] | None, typer.Option(help="Only these; repeat it for several. Default: all.")] = None,
    queued: Annotated[list[int] | None, typer.Option(help="Requests that wait. Default: 100, 1000, 10000.")] = None,
    pairs: Annotated[list[int] | None, typer.Option(help="Pairs of workers. Default: 1, 16.")] = None,
    num_decisions: Annotated[int, typer.Option(min=100, help="Of each run.")] = 5000,
    seed: Annotated[int, typer.Option(help="Of the requests.")] = 0,
    as_json: options.AsJson = False,
) -> None:
    """What a decision costs the scheduler: one arrival, one end, one pick; median and p99 in microseconds.

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

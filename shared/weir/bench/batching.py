"""`weir bench batching`: continuous against static and dynamic batches, same engine, same jobs, real steps.

The runs alternate (A B A B …) and their medians are compared, because the machine's speed drifts. First all jobs are
there at once: tokens/s of each rule. Then they come by a Poisson process at a share of what continuous batching did:
tokens/s and latency against dynamic batching.
"""

import dataclasses
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.table import Table

from weir.bench.report import run_and_print
from weir.bench.solo import EngineJob, JobTimeline, SoloRun, WallTimeline, run_alone
from weir.core.device import Precision
from weir.core.errors import WeirError
from weir.engine.batching.batcher import BatchLimits
from weir.engine.batching.own_rules import Batching, JoinSettings
from weir.engine.batching.running import RunningSettings
from weir.engine.plan import ModelRunner
from weir.model.architecture import ModelConfig
from weir.model.cpu.core_share import FixedShare
from weir.model.errors import ModelError
from weir.model.files.source import resolve_model
from weir.model.load import load_model
from weir.sim.workloads.traces import read_lengths

_NEVER_S = 1e9
_CHUNK_TOKENS = 512
_STEP_TOKENS = 512
_RULES = (Batching.CONTINUOUS, Batching.STATIC_HOLD, Batching.STATIC)


@dataclass(frozen=True, slots=True)
class BatchingConfig:
    """What is run. Lengths are those of `lengths_path`, a trace, divided by the two scales and at least 1."""

    model: str
    lengths_path: Path
    precision: Precision = "auto"
    num_jobs: int = 96
    max_num_seqs: int = 32
    prompt_scale: float = 32.0
    output_scale: float = 8.0
    rounds: int = 3
    load: float = 0.7
    window_ms: float = 50.0
    num_threads: int = 2
    seed: int = 0


@dataclass(frozen=True, slots=True)
class RuleResult:
    """Medians over the rounds of one rule."""

    rule: str
    tokens_a_second: float
    slowest: float
    fastest: float
    ratio: float
    """Tokens/s of continuous batching over this rule's, median over the rounds."""
    num_steps: int
    page_waste: float
    p50_latency_s: float
    p99_latency_s: float


@dataclass(frozen=True, slots=True)
class BatchingReport:
    """`at_once`: every job there from the start; `poisson`: `arrivals_a_second` of them."""

    arithmetic: str
    num_jobs: int
    mean_prompt_tokens: float
    mean_output_tokens: float
    max_output_tokens: int
    at_once: tuple[RuleResult, ...]
    arrivals_a_second: float
    poisson: tuple[RuleResult, ...]


def main(config: BatchingConfig, *, json_output: bool) -> int:
    """Prints tables, or JSON. Returns 1 if the model or the lengths cannot be read."""
    return run_and_print(
        "weir bench batching",
        lambda: measure(config),
        as_dict=dataclasses.asdict,
        tables=as_tables,
        json_output=json_output,
        errors=(ModelError, WeirError, OSError, ValueError),
    )


def measure(config: BatchingConfig) -> BatchingReport:
    """Loads the model and runs everything: minutes. Raises ModelError, WeirError, OSError, ValueError."""
    weights = load_model(resolve_model(config.model), config.precision, FixedShare(config.num_threads))
    jobs = make_jobs(config, weights.config.vocab_size, weights.config.max_context_tokens)
    num_pages = pages_of_largest(jobs, config.max_num_seqs)
    runner = weights.runner_over(np.zeros((num_pages, weights.page_geometry.page_bytes), np.uint8))
    runner.warm_up()
    return compare(config, jobs, Bench(weights.arithmetic, runner, limits_of(config, weights.config), num_pages))


@dataclass(frozen=True, slots=True)
class Bench:
    """What all runs share."""

    arithmetic: str
    runner: ModelRunner
    limits: BatchLimits
    num_pages: int
    timeline: JobTimeline = field(default_factory=WallTimeline)


def compare(config: BatchingConfig, jobs: Sequence[EngineJob], bench: Bench) -> BatchingReport:
    """All runs of all rules."""

    def run(rule: Batching, some_jobs: Sequence[EngineJob]) -> SoloRun:
        settings = RunningSettings(JoinSettings(rule, config.window_ms / 1e3))
        return run_alone(some_jobs, bench.runner, bench.limits, settings, bench.num_pages, bench.timeline)

    at_once: dict[Batching, list[SoloRun]] = {rule: [] for rule in _RULES}
    for _ in range(config.rounds):
        for rule in _RULES:
            at_once[rule].append(run(rule, jobs))
    arrivals_a_second = config.load * statistics.median(r.requests_a_second for r in at_once[Batching.CONTINUOUS])
    coming = with_poisson_arrivals(jobs, arrivals_a_second, config.seed)
    poisson: dict[Batching, list[SoloRun]] = {Batching.CONTINUOUS: [], Batching.DYNAMIC: []}
    for _ in range(config.rounds):
        for rule, runs in poisson.items():
            runs.append(run(rule, coming))
    check_same_length(jobs, [*at_once.values(), *poisson.values()])
    return BatchingReport(
        arithmetic=bench.arithmetic,
        num_jobs=len(jobs),
        mean_prompt_tokens=statistics.mean(len(job.prompt_token_ids) for job in jobs),
        mean_output_tokens=statistics.mean(job.num_output_tokens for job in jobs),
        max_output_tokens=max(job.num_output_tokens for job in jobs),
        at_once=summarize(at_once),
        arrivals_a_second=arrivals_a_second,
        poisson=summarize(poisson),
    )


def make_jobs(config: BatchingConfig, vocab_size: int, max_context_tokens: int) -> list[EngineJob]:
    """Random prompts of the file's lengths, in an order drawn with the seed. Raises ValueError."""
    random_source = random.Random(config.seed)
    lengths = read_lengths(config.lengths_path)
    if len(lengths) < config.num_jobs:
        raise ValueError(f"{config.lengths_path}: {len(lengths)} rows, num_jobs is {config.num_jobs}")
    jobs = []
    for prompt_len, output_len in random_source.sample(lengths, config.num_jobs):
        num_prompt = max(1, round(prompt_len / config.prompt_scale))
        num_output = max(1, round(output_len / config.output_scale))
        if num_prompt + num_output > max_context_tokens:
            raise ValueError(f"{num_prompt} + {num_output} tokens: the model's context is {max_context_tokens}")
        jobs.append(EngineJob(tuple(random_source.randrange(vocab_size) for _ in range(num_prompt)), num_output))
    return jobs


def pages_of_largest(jobs: Sequence[EngineJob], max_num_seqs: int) -> int:
    """So many that no batch is short of pages: the comparison is of rules, not of memory."""
    return sum(sorted((job.num_pages for job in jobs), reverse=True)[:max_num_seqs]) + 2 * max_num_seqs


def limits_of(config: BatchingConfig, model: ModelConfig) -> BatchLimits:
    return BatchLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=_STEP_TOKENS,
        chunk_tokens=_CHUNK_TOKENS,
        max_context_tokens=model.max_context_tokens,
        vocab_size=model.vocab_size,
        max_stall_s=_NEVER_S,
    )


def with_poisson_arrivals(jobs: Sequence[EngineJob], arrivals_a_second: float, seed: int) -> list[EngineJob]:
    random_source = random.Random(seed + 1)
    at_s, coming = 0.0, []
    for job in jobs:
        coming.append(dataclasses.replace(job, arrives_at_s=at_s))
        at_s += random_source.expovariate(arrivals_a_second)
    return coming


def check_same_length(jobs: Sequence[EngineJob], runs: Sequence[Sequence[SoloRun]]) -> None:
    """Every run drew all tokens of every job. Raises RuntimeError."""
    wanted = [job.num_output_tokens for job in jobs]
    for run in (run for rule_runs in runs for run in rule_runs):
        if [len(record.token_ids) for record in run.records] != wanted:
            raise RuntimeError("a run did not draw the tokens that its jobs ask for")


def summarize(runs: Mapping[Batching, Sequence[SoloRun]]) -> tuple[RuleResult, ...]:
    """Of each rule, medians; ratios are taken round by round."""
    continuous = runs[Batching.CONTINUOUS]
    results = []
    for rule, rule_runs in runs.items():
        speeds = [run.tokens_a_second for run in rule_runs]
        ratios = [best.tokens_a_second / speed for best, speed in zip(continuous, speeds, strict=True)]
        latencies_s = [sorted(record.latency_s for record in run.records) for run in rule_runs]
        results.append(
            RuleResult(
                rule=rule.value,
                tokens_a_second=statistics.median(speeds),
                slowest=min(speeds),
                fastest=max(speeds),
                ratio=statistics.median(ratios),
                num_steps=statistics.median_low(run.num_steps for run in rule_runs),
                page_waste=statistics.median(run.page_waste for run in rule_runs),
                p50_latency_s=statistics.median(sorted_s[len(sorted_s) // 2] for sorted_s in latencies_s),
                p99_latency_s=statistics.median(sorted_s[(len(sorted_s) * 99) // 100] for sorted_s in latencies_s),
            )
        )
    return tuple(results)


def as_tables(report: BatchingReport) -> tuple[Table, Table]:
    """At once, and by Poisson arrivals."""
    jobs = (
        f"{report.arithmetic}, {report.num_jobs} jobs, prompts of {report.mean_prompt_tokens:.0f} tokens in the mean, "
        f"answers of {report.mean_output_tokens:.0f}, at most {report.max_output_tokens}"
    )
    at_once = _table(f"all at once: {jobs}", report.at_once)
    return at_once, _table(f"{report.arrivals_a_second:.2f} arrivals/s: {jobs}", report.poisson)


def _table(title: str, results: Sequence[RuleResult]) -> Table:
    table = Table(title=title, caption="x: tokens/s of continuous batching over this rule's; s: latency")
    table.add_column("rule", no_wrap=True)
    for column in ("tokens/s", "from - to", "x", "steps", "p50 s", "p99 s", "waste %"):
        table.add_column(column, justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            result.rule,
            f"{result.tokens_a_second:.1f}",
            f"{result.slowest:.0f} - {result.fastest:.0f}",
            f"{result.ratio:.2f}",
            f"{result.num_steps}",
            f"{result.p50_latency_s:.2f}",
            f"{result.p99_latency_s:.2f}",
            f"{100 * result.page_waste:.2f}",
        )
    return table

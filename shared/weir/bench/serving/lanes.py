"""`weir bench lanes`: what a lane is worth to urgent requests while a flood is served, on a running stack.

Two kinds of run, in turns: in both the same flood comes at once in the lane `batch`, and short requests arrive one by
one while it is served. They come in a lane of their own, or in the flood's.
"""

import asyncio
import json
import os
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from weir.bench.serving.figures import p99
from weir.bench.serving.jobs import random_prompts
from weir.bench.serving.load import in_turns, run_cold
from weir.bench.serving.records import BenchRequest, ServedRequest

_FLOOD = "flood"
_URGENT = "urgent"
_FIRST_URGENT_S = 2.0


@dataclass(frozen=True, slots=True)
class LanesConfig:
    """Lengths in tokens; `urgent_rate` a second, Poisson."""

    base_url: str
    model: str
    urgent_lane: str = "interactive"
    flood_lane: str = "batch"
    num_flood: int = 96
    flood_input_len: int = 128
    flood_output_len: int = 96
    num_urgent: int = 20
    urgent_input_len: int = 32
    urgent_output_len: int = 8
    urgent_rate: float = 1.0
    rounds: int = 3
    seed: int = 0
    api_key: str = ""


@dataclass(frozen=True, slots=True)
class Side:
    """Pooled over the rounds of one kind."""

    urgent_ttfts_s: tuple[float, ...]
    flood_tok_per_s: tuple[float, ...]
    """One a round: output tokens of the flood over the time to its last one."""
    p99_by_round_s: tuple[float, ...]


def main(config: LanesConfig, *, json_output: bool, out: Path | None) -> int:
    """Prints both sides and their ratio. Returns 1 if any request failed."""
    try:
        with_lane, without_lane = asyncio.run(_measure(config))
    except RuntimeError as error:
        print(f"error: {error}; --base-url must name the HTTP port of a stack that runs (`weir up`)")
        return 1
    text = report(config, with_lane, without_lane)
    print(json.dumps(figures(with_lane, without_lane)) if json_output else text)
    if out is not None:
        out.write_text(text)
    return 0


def jobs_of(config: LanesConfig, urgent_lane: str, seed: int) -> list[BenchRequest]:
    """The flood, and the urgent requests behind it in time."""
    flood = [
        BenchRequest(prompt, config.flood_output_len, 0.0, config.flood_lane, _FLOOD)
        for prompt in random_prompts(config.num_flood, config.flood_input_len, seed)
    ]
    source = random.Random(seed)
    times_s = accumulate(source.expovariate(config.urgent_rate) for _ in range(config.num_urgent))
    prompts = random_prompts(config.num_urgent, config.urgent_input_len, seed + 1)
    return flood + [
        BenchRequest(prompt, config.urgent_output_len, _FIRST_URGENT_S + at_s, urgent_lane, _URGENT)
        for prompt, at_s in zip(prompts, times_s, strict=True)
    ]


def figures(with_lane: Side, without_lane: Side) -> dict[str, float]:
    """In ms, and the ratio of the pooled p99."""
    values: dict[str, float] = {}
    for name, side in (("with_lane", with_lane), ("without_lane", without_lane)):
        values |= {
            f"{name}_p50_ttft_ms": 1000 * statistics.median(side.urgent_ttfts_s),
            f"{name}_p99_ttft_ms": 1000 * p99(side.urgent_ttfts_s),
            f"{name}_flood_tok_per_s": statistics.median(side.flood_tok_per_s),
        }
    return values | {"p99_ttft_ratio": values["without_lane_p99_ttft_ms"] / values["with_lane_p99_ttft_ms"]}


def report(config: LanesConfig, with_lane: Side, without_lane: Side) -> str:
    """As Markdown."""
    values = figures(with_lane, without_lane)
    lines = [
        "# A lane of its own, under a flood, live",
        "",
        f"Flood: {config.num_flood} requests at once in lane `{config.flood_lane}`, {config.flood_input_len} tokens in,"
        f" {config.flood_output_len} out. Urgent: {config.num_urgent} a run, Poisson at {config.urgent_rate:g}/s,"
        f" {config.urgent_input_len} in, {config.urgent_output_len} out. {config.rounds} runs of each kind in turns,"
        f" seeds {config.seed} to {config.seed + config.rounds - 1}; {os.cpu_count()} cores.",
        "",
        "| urgent requests in | p50 TTFT | p99 TTFT | p99 of each run | flood, output tok/s of each run |",
        "|---|---|---|---|---|",
    ]
    for name, key, side in (
        (f"their own lane `{config.urgent_lane}`", "with_lane", with_lane),
        (f"the flood's lane `{config.flood_lane}`", "without_lane", without_lane),
    ):
        runs = ", ".join(f"{1000 * value:.0f}" for value in side.p99_by_round_s)
        speeds = ", ".join(f"{value:.0f}" for value in side.flood_tok_per_s)
        p50, high = values[f"{key}_p50_ttft_ms"], values[f"{key}_p99_ttft_ms"]
        lines.append(f"| {name} | {p50:.0f} ms | {high:.0f} ms | {runs} | {speeds} |")
    lines += ["", f"p99 TTFT: {values['p99_ttft_ratio']:.1f} times lower in a lane of their own.", ""]
    return "\n".join(lines)


async def _measure(config: LanesConfig) -> tuple[Side, Side]:
    sides: dict[str, list[list[ServedRequest]]] = {config.urgent_lane: [], config.flood_lane: []}
    for number, lane in in_turns((config.urgent_lane, config.flood_lane), config.rounds):
        jobs = jobs_of(config, lane, config.seed + number)
        sides[lane].append(await run_cold(config.base_url, config.model, jobs, config.api_key))
    return _side(sides[config.urgent_lane]), _side(sides[config.flood_lane])


def _side(runs: Sequence[Sequence[ServedRequest]]) -> Side:
    urgent = [[record.ttft_s for record in run if record.tenant == _URGENT] for run in runs]
    speeds = []
    for run in runs:
        flood = [record for record in run if record.tenant == _FLOOD]
        began_s = min(record.started_s for record in flood)
        ended_s = max(record.started_s + record.latency_s for record in flood)
        speeds.append(sum(record.output_len for record in flood) / (ended_s - began_s))
    return Side(tuple(ttft_s for run in urgent for ttft_s in run), tuple(speeds), tuple(p99(run) for run in urgent))

"""`weir bench step`: how fast this machine prefills and decodes, with no server around it.

Prefill is bound by arithmetic, decode by reading every weight once a step: the floor beside a decode's time is the
weights' size over the memory bandwidth measured in the same run.
"""

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from weir.bench.step.timing import (
    DECODE_CONTEXT,
    DecodeSplit,
    StepTime,
    decode_plan,
    memory_bandwidth,
    prefill_plan,
    time_step,
)
from weir.core.device import Precision
from weir.kv.geometry import num_pages_for
from weir.model.cpu.core_share import FixedShare
from weir.model.errors import ModelError
from weir.model.files.source import resolve_model
from weir.model.load import Int8Weights, LoadedWeights, Runner, load_model

_PREFILL_TOKENS = (128, 512)
_DECODE_SEQUENCES = (1, 8, 32)


@dataclass(frozen=True, slots=True)
class StepReport:
    """What `weir bench step` measured."""

    model: str
    precision: str
    num_threads: int
    weights_bytes: int
    bandwidth_bytes_a_second: float
    steps: tuple[StepTime, ...]
    splits: tuple[DecodeSplit, ...]
    """Of int8 only."""


def main(model: str, json_output: bool = False, num_threads: int | None = None, precision: Precision = "auto") -> int:
    """Prints a table, or JSON. Returns the exit code: 1 if the model cannot be loaded."""
    console = Console()
    try:
        report = measure(model, num_threads or len(os.sched_getaffinity(0)), precision)
    except ModelError as error:
        Console(stderr=True).print(f"weir bench step: {error}", markup=False, highlight=False)
        return 1
    if json_output:
        print(json.dumps(as_json(report), indent=2))
    else:
        console.print(as_table(report))
        if report.splits:
            console.print(split_table(report.splits))
    return 0


def measure(model: str, num_threads: int, precision: Precision = "auto") -> StepReport:
    """Raises ModelError. Takes some 20 s for the built-in model, and a minute where kernels are compiled first."""
    source = resolve_model(model)
    torch.set_num_threads(num_threads)
    weights = load_model(source, precision, FixedShare(num_threads))
    bandwidth = memory_bandwidth()
    runner = _make_runner(weights)
    steps = measure_steps(weights, runner, weights.num_bytes / bandwidth * 1e3)
    splits: list[DecodeSplit] = []
    if isinstance(weights, Int8Weights):
        from weir.bench.step.decode_split import measure_split  # noqa: PLC0415 - compiled kernels, which fp32 does without

        splits = [measure_split(weights, runner, FixedShare(num_threads), number) for number in _DECODE_SEQUENCES]
    return StepReport(
        source.name, weights.arithmetic, num_threads, weights.num_bytes, bandwidth, tuple(steps), tuple(splits)
    )


def _make_runner(weights: LoadedWeights) -> Runner:
    """Over an arena in this process's memory."""
    pages_a_sequence = num_pages_for(max(*_PREFILL_TOKENS, DECODE_CONTEXT + 1))
    num_pages = max(pages_a_sequence, max(_DECODE_SEQUENCES) * num_pages_for(DECODE_CONTEXT + 1))
    # zeros are valid keys and values; the time of a step does not depend on what they are
    pages = np.zeros((num_pages, weights.page_geometry.page_bytes), dtype=np.uint8)
    runner = weights.runner_over(pages)
    runner.warm_up()
    return runner


def measure_steps(weights: LoadedWeights, runner: Runner, floor_ms: float) -> list[StepTime]:
    """Greedy steps."""
    config = weights.config
    steps = []
    for num_tokens in sorted({min(length, config.max_context_tokens) for length in _PREFILL_TOKENS}):
        plan = prefill_plan(num_tokens, config.vocab_size)
        steps.append(time_step(f"prefill, {num_tokens}", plan, runner.run, floor_ms))
    for num_sequences in _DECODE_SEQUENCES:
        plan = decode_plan(num_sequences)
        steps.append(time_step(f"decode, {num_sequences}", plan, runner.run, floor_ms))
    return steps


def as_json(report: StepReport) -> dict[str, object]:
    """The report's fields, with each step's tokens a second."""
    steps: Sequence[dict[str, object]] = [
        dataclasses.asdict(step) | {"tokens_a_second": step.tokens_a_second} for step in report.steps
    ]
    return dataclasses.asdict(report) | {"steps": steps}


def as_table(report: StepReport) -> Table:
    """One row a kind of step."""
    table = Table(
        title=f"{report.model}, {report.precision}, {report.num_threads} threads, "
        f"weights {report.weights_bytes / 1e6:.0f} MB, memory {report.bandwidth_bytes_a_second / 1e9:.1f} GB/s",
        caption=f"prefill: tokens of one prompt; decode: sequences at {DECODE_CONTEXT} tokens of context",
    )
    table.add_column("step")
    for column in ("tokens/s", "ms", "fastest", "slowest", "floor ms", "floors"):
        table.add_column(column, justify="right")
    for step in report.steps:
        table.add_row(
            step.name,
            f"{step.tokens_a_second:.1f}",
            f"{step.median_ms:.1f}",
            f"{step.fastest_ms:.1f}",
            f"{step.slowest_ms:.1f}",
            f"{step.floor_ms:.1f}",
            f"{step.median_ms / step.floor_ms:.1f}",
        )
    return table


def split_table(splits: Sequence[DecodeSplit]) -> Table:
    """One row a number of sequences."""
    table = Table(title="where a decode step's milliseconds go")
    table.add_column("sequences", justify="right")
    for column in ("linear", "head", "attention", "other"):
        table.add_column(column, justify="right")
    for split in splits:
        parts = (split.linear_ms, split.head_ms, split.attention_ms, split.other_ms)
        table.add_row(str(split.num_sequences), *(f"{part:.2f}" for part in parts))
    return table

"""`weir bench step`: how fast this machine prefills and decodes, with no server around it.

Prefill is bound by arithmetic, decode by reading every weight once a step: the floor beside a decode's time is the
weights' size over the memory bandwidth measured in the same run.
"""

import dataclasses
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from rich.table import Table

from weir.bench.report import run_and_print
from weir.bench.step_shapes import StepShape, timed_ms
from weir.core.device import Precision
from weir.core.errors import WeirError
from weir.engine.plan import StepPlan
from weir.model.cpu.core_share import FixedShare
from weir.model.errors import ModelError
from weir.model.files.source import resolve_model
from weir.model.load import Int8Weights, Runner, load_model

if TYPE_CHECKING:
    from weir.bench.decode_split import DecodeSplit

_DECODE_CONTEXT = 160
_PREFILL_TOKENS = (128, 512)
_DECODE_SEQUENCES = (1, 8, 32)
_REPEATS = 9
_BANDWIDTH_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class StepTime:
    """One kind of step, timed `_REPEATS` times. `floor_ms`: reading every weight once at the measured bandwidth."""

    name: str
    num_tokens: int
    median_ms: float
    fastest_ms: float
    slowest_ms: float
    floor_ms: float

    @property
    def tokens_a_second(self) -> float:
        return self.num_tokens / self.median_ms * 1e3


@dataclass(frozen=True, slots=True)
class StepReport:
    """What `weir bench step` measured."""

    model: str
    precision: str
    num_threads: int
    weights_bytes: int
    bandwidth_bytes_a_second: float
    steps: tuple[StepTime, ...]
    splits: "tuple[DecodeSplit, ...]"
    """Of int8 only."""


def main(model: str, json_output: bool = False, num_threads: int | None = None, precision: Precision = "auto") -> int:
    """Prints a table, or JSON. Returns the exit code: 1 if the model cannot be loaded."""
    return run_and_print(
        "weir bench step",
        lambda: measure(model, num_threads or len(os.sched_getaffinity(0)), precision),
        as_dict=as_dict,
        tables=lambda report: [as_table(report), *([split_table(report.splits)] if report.splits else [])],
        json_output=json_output,
        errors=(ModelError, WeirError),
    )


def measure(model: str, num_threads: int, precision: Precision = "auto") -> StepReport:
    """Raises ModelError, WeirError.

    Takes some 20 s for the built-in model, and a minute where kernels are compiled first."""
    source = resolve_model(model)
    torch.set_num_threads(num_threads)
    weights = load_model(source, precision, FixedShare(num_threads))
    bandwidth = memory_bandwidth()
    lengths = sorted({min(length, weights.config.max_context_tokens) for length in _PREFILL_TOKENS})
    decodes = [StepShape(num_decodes=number, context_tokens=_DECODE_CONTEXT + 1) for number in _DECODE_SEQUENCES]
    shapes = {f"prefill, {length}": StepShape(length) for length in lengths}
    shapes |= {f"decode, {shape.num_decodes}": shape for shape in decodes}
    # zeros are valid keys and values; the time of a step does not depend on what they are
    num_pages = max(shape.num_pages for shape in shapes.values())
    runner = weights.runner_over(np.zeros((num_pages, weights.page_geometry.page_bytes), dtype=np.uint8))
    runner.warm_up()
    floor_ms = weights.num_bytes / bandwidth * 1e3
    steps = [time_step(name, shape.plan(weights.config.vocab_size), runner, floor_ms) for name, shape in shapes.items()]
    splits: list[DecodeSplit] = []
    if isinstance(weights, Int8Weights):
        from weir.bench.decode_split import measure_split  # noqa: PLC0415 - compiled kernels, which fp32 does without

        splits = [measure_split(weights, runner, FixedShare(num_threads), shape) for shape in decodes]
    return StepReport(
        source.name, weights.arithmetic, num_threads, weights.num_bytes, bandwidth, tuple(steps), tuple(splits)
    )


def time_step(name: str, plan: StepPlan, runner: Runner, floor_ms: float) -> StepTime:
    """One step unmeasured, then `_REPEATS` measured ones."""
    times_ms = timed_ms(lambda: runner.run(plan), _REPEATS)
    return StepTime(name, plan.num_tokens, statistics.median(times_ms), min(times_ms), max(times_ms), floor_ms=floor_ms)


def memory_bandwidth() -> float:
    """Bytes a second that all threads together read from memory, at best; far more data than any cache holds."""
    data = torch.ones(_BANDWIDTH_BYTES // 4)
    return _BANDWIDTH_BYTES / (min(timed_ms(data.sum, _REPEATS)) / 1e3)


def as_dict(report: StepReport) -> dict[str, object]:
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
        caption=f"prefill: tokens of one prompt; decode: sequences at {_DECODE_CONTEXT} tokens of context",
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


def split_table(splits: "Sequence[DecodeSplit]") -> Table:
    """One row a number of sequences."""
    table = Table(title="where a decode step's milliseconds go")
    table.add_column("sequences", justify="right")
    for column in ("linear", "head", "attention", "other"):
        table.add_column(column, justify="right")
    for split in splits:
        parts = (split.linear_ms, split.head_ms, split.attention_ms, split.other_ms)
        table.add_row(str(split.num_sequences), *(f"{part:.2f}" for part in parts))
    return table

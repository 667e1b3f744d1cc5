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
from weir.model.load import Int8Weights, LoadedWeights, Runner, load_model

if TYPE_CHECKING:
    from weir.bench.step_split import StepSplit

_DECODE_CONTEXT = 160
_PREFILL_TOKENS = (128, 512)
_DECODE_SEQUENCES = (1, 8, 32)
_LONG_CONTEXT = 4000
_LONG_PREFILL_TOKENS = 512
_LONG_DECODE_SEQUENCES = (1, 8)
_MOST_PAGES_BYTES = 1 << 30
"""Long contexts that take more are left out."""
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
    splits: "tuple[StepSplit, ...]"
    """Of the same steps; of int8 only."""


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

    Takes a minute or two for the built-in model, and longer where kernels are compiled first."""
    source = resolve_model(model)
    torch.set_num_threads(num_threads)
    weights = load_model(source, precision, FixedShare(num_threads))
    bandwidth = memory_bandwidth()
    shapes = _shapes(weights)
    # written, for memory that nobody has written is one page of zeros, which caches hold; what is in it does not matter
    pages = np.empty((max(shape.num_pages for shape in shapes.values()), weights.page_geometry.page_bytes), np.uint8)
    pages.fill(0)
    runner = weights.runner_over(pages)
    runner.warm_up()
    floor_ms = weights.num_bytes / bandwidth * 1e3
    steps = [time_step(name, shape.plan(weights.config.vocab_size), runner, floor_ms) for name, shape in shapes.items()]
    splits: tuple[StepSplit, ...] = ()
    if isinstance(weights, Int8Weights):
        from weir.bench.step_split import measure_splits  # noqa: PLC0415 - compiled kernels, which fp32 does without

        splits = measure_splits(weights, shapes, pages, num_threads)
    return StepReport(source.name, weights.arithmetic, num_threads, weights.num_bytes, bandwidth, tuple(steps), splits)


def _shapes(weights: LoadedWeights) -> dict[str, StepShape]:
    """Steps by name; those of long contexts where the model, and this machine's memory, has room for them."""
    most_tokens = weights.config.max_context_tokens
    lengths = sorted({min(length, most_tokens) for length in _PREFILL_TOKENS})
    shapes = {f"prefill, {length}": StepShape(length) for length in lengths}
    shapes |= {
        f"decode, {number}": StepShape(num_decodes=number, context_tokens=_DECODE_CONTEXT + 1)
        for number in _DECODE_SEQUENCES
    }
    after = f"after {_LONG_CONTEXT}"
    long = {f"prefill, {_LONG_PREFILL_TOKENS} {after}": StepShape(_LONG_PREFILL_TOKENS, _LONG_CONTEXT)}
    long |= {
        f"decode, {number} {after}": StepShape(num_decodes=number, context_tokens=_LONG_CONTEXT + 1)
        for number in _LONG_DECODE_SEQUENCES
    }
    most_pages = _MOST_PAGES_BYTES // weights.page_geometry.page_bytes
    if most_tokens < _LONG_CONTEXT + _LONG_PREFILL_TOKENS or any(one.num_pages > most_pages for one in long.values()):
        return shapes
    return shapes | long


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


def split_table(splits: "Sequence[StepSplit]") -> Table:
    """One column a step."""
    table = Table(title="where a step's milliseconds go")
    table.add_column("part")
    for split in splits:
        table.add_column(split.name, justify="right")
    for part in splits[0].parts_ms:
        table.add_row(part, *(f"{split.parts_ms[part]:.2f}" for split in splits))
    table.add_row("all", *(f"{split.whole_ms:.2f}" for split in splits))
    return table

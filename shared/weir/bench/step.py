"""`weir bench step`: how fast this machine prefills and decodes, with no server around it.

Prefill is bound by arithmetic, decode by reading every weight once a step: the floor beside a decode's time is the
weights' size over the memory bandwidth measured in the same run.
"""

import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from weir.core.sampling import SamplingParams
from weir.engine.plan import ChunkPlan, SampleSpec, StepPlan
from weir.kv.geometry import num_pages_for
from weir.model.config import ModelConfig, load_model_config
from weir.model.errors import ModelError
from weir.model.runner import TorchRunner
from weir.model.source import resolve_model
from weir.model.weights import Weights, load_weights

_PREFILL_TOKENS = (128, 512)
_DECODE_SEQUENCES = (1, 8, 32)
_DECODE_CONTEXT = 160
_REPEATS = 9
_BANDWIDTH_BYTES = 256 << 20
_GREEDY = SamplingParams(temperature=0.0)


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
    num_threads: int
    weights_bytes: int
    bandwidth_bytes_a_second: float
    steps: tuple[StepTime, ...]


def main(model: str, json_output: bool = False, num_threads: int | None = None) -> int:
    """Prints a table, or JSON. Returns the exit code: 1 if the model cannot be loaded."""
    console = Console()
    try:
        report = measure(model, num_threads or os.cpu_count() or 1)
    except ModelError as error:
        Console(stderr=True).print(f"weir bench step: {error}", markup=False, highlight=False)
        return 1
    if json_output:
        print(json.dumps(as_json(report), indent=2))
    else:
        console.print(as_table(report))
    return 0


def measure(model: str, num_threads: int) -> StepReport:
    """Raises ModelError. Takes some 20 s for the built-in model."""
    source = resolve_model(model)
    torch.set_num_threads(num_threads)
    config = load_model_config(source)
    weights = load_weights(source, config)
    bandwidth = memory_bandwidth()
    floor_ms = weights.num_bytes / bandwidth * 1e3
    steps = measure_steps(config, weights, floor_ms)
    return StepReport(source.name, num_threads, weights.num_bytes, bandwidth, tuple(steps))


def measure_steps(config: ModelConfig, weights: Weights, floor_ms: float) -> list[StepTime]:
    """Greedy steps over an arena in this process's memory."""
    pages_a_sequence = num_pages_for(max(*_PREFILL_TOKENS, _DECODE_CONTEXT + 1))
    num_pages = max(pages_a_sequence, max(_DECODE_SEQUENCES) * num_pages_for(_DECODE_CONTEXT + 1))
    # zeros are valid keys and values; the time of a step does not depend on what they are
    runner = TorchRunner(config, weights, np.zeros((num_pages, config.page_geometry.page_bytes), dtype=np.uint8))
    steps = []
    for num_tokens in sorted({min(length, config.max_context_tokens) for length in _PREFILL_TOKENS}):
        plan = prefill_plan(num_tokens, config.vocab_size)
        steps.append(time_step(f"prefill, {num_tokens}", plan, runner.run, floor_ms))
    for num_sequences in _DECODE_SEQUENCES:
        plan = decode_plan(num_sequences)
        steps.append(time_step(f"decode, {num_sequences}", plan, runner.run, floor_ms))
    return steps


def prefill_plan(num_tokens: int, vocab_size: int) -> StepPlan:
    """One prompt in one chunk."""
    token_ids = tuple((7 * position) % vocab_size for position in range(num_tokens))
    table = tuple(range(num_pages_for(num_tokens)))
    return StepPlan(0, (ChunkPlan(0, 0, token_ids, table, SampleSpec(_GREEDY, 0)),))


def decode_plan(num_sequences: int) -> StepPlan:
    """One token each, behind `_DECODE_CONTEXT` tokens in pages of their own."""
    num_pages = num_pages_for(_DECODE_CONTEXT + 1)
    sample = SampleSpec(_GREEDY, 1)
    chunks = (
        ChunkPlan(slot, _DECODE_CONTEXT, (1,), tuple(range(slot * num_pages, (slot + 1) * num_pages)), sample)
        for slot in range(num_sequences)
    )
    return StepPlan(0, tuple(chunks))


def time_step(name: str, plan: StepPlan, run: Callable[[StepPlan], object], floor_ms: float) -> StepTime:
    """One step unmeasured, then `_REPEATS` measured ones."""
    times_ms = timed_ms(lambda: run(plan), _REPEATS)
    return StepTime(name, plan.num_tokens, statistics.median(times_ms), min(times_ms), max(times_ms), floor_ms=floor_ms)


def memory_bandwidth() -> float:
    """Bytes a second that all threads together read from memory, at best; far more data than any cache holds."""
    data = torch.ones(_BANDWIDTH_BYTES // 4)
    return _BANDWIDTH_BYTES / (min(timed_ms(data.sum, _REPEATS)) / 1e3)


def timed_ms(call: Callable[[], object], repeats: int) -> list[float]:
    call()
    times_ms = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        call()
        times_ms.append((time.perf_counter() - start_s) * 1e3)
    return times_ms


def as_json(report: StepReport) -> dict[str, object]:
    """The report's fields, with each step's tokens a second."""
    steps: Sequence[dict[str, object]] = [
        dataclasses.asdict(step) | {"tokens_a_second": step.tokens_a_second} for step in report.steps
    ]
    return dataclasses.asdict(report) | {"steps": steps}


def as_table(report: StepReport) -> Table:
    """One row a kind of step."""
    table = Table(
        title=f"{report.model}, {report.num_threads} threads, weights {report.weights_bytes / 1e6:.0f} MB, "
        f"memory {report.bandwidth_bytes_a_second / 1e9:.1f} GB/s",
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

"""What the host does before a decode step on a GPU, without one: `python -m benchmarks.gpu.prepare`."""

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, replace

import torch

from weir.core.sampling import SamplingParams
from weir.engine.plan import ChunkPlan, SampleSpec, StepPlan
from weir.kv.geometry import PAGE_TOKENS, num_pages_for
from weir.model.triton.batch import BatchMaker, TritonLimits, padded_decodes
from weir.model.triton.memory import StepUpload

_VOCAB_SIZE = 128_256
_NUM_PAGES = 40_000
_LIMITS = TritonLimits(max_rows=2048, max_sequences=256, max_context_tokens=4096)
_TABLE_WIDTH = 128
_WARM_UPS = 20


@dataclass(frozen=True, slots=True)
class PrepareTime:
    """Of one step: from its plan to the arrays in the staging buffer."""

    kind: str
    num_rows: int
    median_us: float
    fastest_us: float
    slowest_us: float


def decode_steps(num_rows: int, context: int, num_steps: int, params: SamplingParams) -> list[StepPlan]:
    """Steps as an engine plans them: a table is the same tuple until a page is added."""
    tables = [
        tuple((row * 97 + page) % _NUM_PAGES for page in range(context // PAGE_TOKENS)) for row in range(num_rows)
    ]
    steps = []
    for step in range(num_steps):
        chunks = []
        for row in range(num_rows):
            start = context + row % PAGE_TOKENS + step
            while len(tables[row]) < num_pages_for(start + 1):
                tables[row] += ((row * 31 + step) % _NUM_PAGES,)
            spec = SampleSpec(replace(params, seed=row), step + 1)
            chunks.append(ChunkPlan(row, start, (row + step,), tables[row], spec))
        steps.append(StepPlan(step, tuple(chunks)))
    return steps


def measure(kind: str, steps: list[StepPlan]) -> PrepareTime:
    num_rows = len(steps[0].chunks)
    batches = BatchMaker(_NUM_PAGES, _VOCAB_SIZE, _LIMITS)
    upload = StepUpload(_LIMITS.upload_bytes, torch.device("cpu"))
    times_us = []
    for plan in steps:
        started_ns = time.perf_counter_ns()
        padded_decodes(batches.make(plan), num_rows, _TABLE_WIDTH, upload)
        times_us.append((time.perf_counter_ns() - started_ns) / 1000)
    times_us = times_us[_WARM_UPS:]
    return PrepareTime(kind, num_rows, statistics.median(times_us), min(times_us), max(times_us))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    print("| us a step | median | fastest | slowest | a row |\n|---|---|---|---|---|")
    for num_rows in arguments.rows:
        for kind, temperature in (("greedy", 0.0), ("temperature", 0.8)):
            params = SamplingParams(temperature=temperature)
            found = measure(kind, decode_steps(num_rows, arguments.context, arguments.steps + _WARM_UPS, params))
            figures = (found.median_us, found.fastest_us, found.slowest_us, found.median_us / num_rows)
            print(f"| {kind}, {num_rows} rows | {' | '.join(f'{figure:.4g}' for figure in figures)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

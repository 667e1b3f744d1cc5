"""What the host does for a decode step on a GPU, without one: `python -m benchmarks.gpu.prepare`.

The arrays of the forward pass are made before it is launched; those of sampling after that, while the GPU computes.
"""

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
from weir.model.triton.sampling import draw_arrays
from weir.ops.gpu.decode_work import WorkSize, decode_tiles

_VOCAB_SIZE = 128_256
_NUM_PAGES = 40_000
_LIMITS = TritonLimits(max_rows=2048, max_sequences=256, max_context_tokens=4096)
_TILES = decode_tiles(128, torch.bfloat16)
_MOST_WORK = WorkSize(1, 1)
"""Concerns launches only."""
_WARM_UPS = 20


@dataclass(frozen=True, slots=True)
class PrepareTime:
    """Of one step: from its plan to the arrays of the forward pass in the staging buffer, and of sampling."""

    forward_us: tuple[float, ...]
    sampling_us: tuple[float, ...]


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


def measure(steps: list[StepPlan]) -> PrepareTime:
    num_rows = len(steps[0].chunks)
    batches = BatchMaker(_NUM_PAGES, _VOCAB_SIZE, _LIMITS)
    upload = StepUpload(_LIMITS.upload_bytes, torch.device("cpu"))
    forward_us, sampling_us = [], []
    for plan in steps:
        started_ns = time.perf_counter_ns()
        batch = batches.make(plan)
        padded_decodes(batch, num_rows, upload, _TILES, _MOST_WORK)
        made_ns = time.perf_counter_ns()
        draw_arrays([row.spec for row in batch.sampled])
        forward_us.append((made_ns - started_ns) / 1000)
        sampling_us.append((time.perf_counter_ns() - made_ns) / 1000)
    return PrepareTime(tuple(forward_us[_WARM_UPS:]), tuple(sampling_us[_WARM_UPS:]))


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
            found = measure(decode_steps(num_rows, arguments.context, arguments.steps + _WARM_UPS, params))
            for part, times_us in (("forward", found.forward_us), ("sampling", found.sampling_us)):
                median_us = statistics.median(times_us)
                figures = (median_us, min(times_us), max(times_us), median_us / num_rows)
                cells = " | ".join(f"{figure:.4g}" for figure in figures)
                print(f"| {kind}, {num_rows} rows, {part} | {cells} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

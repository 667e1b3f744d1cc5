"""Steps of a dummy model on a GPU beside the time that its bytes take: `python -m benchmarks.gpu.step`.

By graphs first, then where the time of one replay goes, the products alone, and steps launched one kernel at a time
last.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.case_loop import CaseLoop, CaseSkipped, Selection, add_options
from benchmarks.gpu.model import CudaKind
from benchmarks.gpu.output import PROFILE, Record, append
from benchmarks.gpu.products import time_exact_products, time_products
from benchmarks.gpu.timer import Ceilings, CudaTimer, measure_ceilings
from weir.core.sampling import SamplingParams
from weir.engine.plan import ChunkPlan, ModelRunner, SampleSpec, StepPlan
from weir.kv.geometry import num_pages_for
from weir.kv.memory.device import DeviceMemory
from weir.model.architecture import ModelConfig, tensor_shapes
from weir.model.triton.batch import TritonLimits

_LIMITS = TritonLimits(max_rows=2048, max_sequences=128, max_context_tokens=4096)
_MOST_PAGES = 12_000
_RESERVED_BYTES = 6 << 30  # buffers, graphs, workspaces, what measures the ceilings
_CONTEXT = 1024
_DECODE_ROWS = (1, 32, 128, 8)
_PREFILL_TOKENS = (2048, 512, 128)
_MIXED = ((32, 256), (8, 64))
"""Decodes, and tokens of one prompt beside them."""
_PROFILED_ROWS = (32, 1)
_REPEATS = 20
_WARM_UPS = 3
_PROFILED_LINES = 25
_BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class StepWork:
    """A step that can be run again and again, and what it reads and computes at the least."""

    plan: StepPlan
    num_tokens: int
    num_bytes: int
    num_flops: int


def decode_work(config: ModelConfig, num_rows: int, num_pages: int) -> StepWork:
    """One token of each of `num_rows` sequences of 1024 tokens, greedy."""
    pages_each = num_pages_for(_CONTEXT + 1)
    # sequences beyond the memory share pages: reads are the same, and what is written is never read
    tables = [tuple((row * pages_each + page) % num_pages for page in range(pages_each)) for row in range(num_rows)]
    spec = SampleSpec(SamplingParams(temperature=0.0), 1)
    chunks = tuple(ChunkPlan(row, _CONTEXT, (row + 1,), tables[row], spec) for row in range(num_rows))
    num_bytes = _matrix_bytes(config) + num_rows * _CONTEXT * _kv_bytes_a_token(config)
    return StepWork(StepPlan(0, chunks), num_rows, num_bytes, 2 * num_rows * _matrix_bytes(config) // _BF16_BYTES)


def prefill_work(config: ModelConfig, num_tokens: int) -> StepWork:
    spec = SampleSpec(SamplingParams(temperature=0.0), 0)
    chunk = ChunkPlan(0, 0, (1,) * num_tokens, tuple(range(num_pages_for(num_tokens))), spec)
    num_flops = 2 * num_tokens * _matrix_bytes(config) // _BF16_BYTES
    return StepWork(StepPlan(0, (chunk,)), num_tokens, _matrix_bytes(config), num_flops)


def mixed_work(config: ModelConfig, num_decodes: int, num_tokens: int, num_pages: int) -> StepWork:
    """Decodes as `decode_work` has them, and a chunk of a prompt from which nothing is sampled."""
    decodes = decode_work(config, num_decodes, num_pages)
    table = tuple(range(num_pages - num_pages_for(num_tokens), num_pages))
    chunk = ChunkPlan(num_decodes, 0, (1,) * num_tokens, table, None)
    return StepWork(
        StepPlan(0, (*decodes.plan.chunks, chunk)),
        num_decodes + num_tokens,
        decodes.num_bytes,
        decodes.num_flops + prefill_work(config, num_tokens).num_flops,
    )


def time_step(runner: ModelRunner, work: StepWork, ceilings: Ceilings) -> Iterator[Record]:
    """`times_floor`: of what its bytes or operations take at the speeds that were measured in this run."""
    times_s = []
    for number in range(_WARM_UPS + _REPEATS):
        started_s = time.perf_counter()
        runner.run(work.plan)  # ends when the tokens are on the host
        if number >= _WARM_UPS:
            times_s.append(time.perf_counter() - started_s)
    median_s = statistics.median(times_s)
    floor_ms = ceilings.floor_us(work.num_bytes, work.num_flops) / 1000
    yield {
        "median_ms": 1000 * median_s,
        "fastest_ms": 1000 * min(times_s),
        "tokens_a_second": work.num_tokens / median_s,
        "floor_ms": floor_ms,
        "times_floor": 1000 * median_s / floor_ms,
    }


@dataclass(frozen=True, slots=True)
class _Made:
    """A model that is ready to run steps."""

    memory: DeviceMemory
    runner: ModelRunner
    num_pages: int


class _Model:
    """A model in one way of running decodes, made when the first case asks for it; what that raises, all get."""

    def __init__(self, kind: CudaKind) -> None:
        self._kind = kind
        self._made: _Made | None = None
        self._problem: Exception | None = None

    def get(self) -> _Made:
        """Raises CaseSkipped if this GPU has no room for it, and what the runner raises."""
        if self._problem is not None:
            raise self._problem
        if self._made is None:
            try:
                self._made = _make(self._kind)
            except Exception as problem:
                self._problem = problem
                raise
        return self._made

    def close(self) -> None:
        """Gives its memory back."""
        made, self._made = self._made, None
        if made is None:
            return
        memory = made.memory
        del made
        torch.cuda.synchronize()
        memory.close()
        torch.cuda.empty_cache()


def _make(kind: CudaKind) -> _Made:
    num_pages = _num_pages(kind)
    memory = kind.create_memory(num_pages * kind.page_bytes)
    runner, warm_up = kind.make_runner(memory, num_pages)
    warm_up()
    return _Made(memory, runner, num_pages)


def _num_pages(kind: CudaKind) -> int:
    free_bytes, _ = torch.cuda.mem_get_info()
    room = (free_bytes - _weight_bytes(kind.config) - _RESERVED_BYTES) // kind.page_bytes
    least = num_pages_for(max(_CONTEXT + 1, *_PREFILL_TOKENS))
    if room < least:
        raise CaseSkipped(f"{kind.model_shape} has no room in {free_bytes / 2**30:.1f} GiB of free memory")
    return min(room, _MOST_PAGES)


def _profile(runner: ModelRunner, work: StepWork, heading: str, out: Path | None) -> Iterator[Record]:
    """Kernels of one step by their time on the device; what the profiler cannot see is the step's time less theirs."""
    from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415 - seconds, for this alone

    runner.run(work.plan)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        runner.run(work.plan)
    averages = found.key_averages()
    table = averages.table(sort_by="self_device_time_total", row_limit=_PROFILED_LINES, max_name_column_width=80)
    if out is not None:
        append(out / PROFILE, f"\n== {heading}\n{table}\n")
    # what launched a kernel is charged with its time too
    kernels = [each for each in averages if str(each.device_type) == "DeviceType.CUDA"]
    kernels.sort(key=lambda each: -each.self_device_time_total)
    total_us = sum(each.self_device_time_total for each in kernels)
    if total_us == 0:
        raise RuntimeError("the profiler saw no kernel: CUPTI may be missing, or not permitted to this user")
    for each in kernels[:_PROFILED_LINES]:
        if each.self_device_time_total > 0:
            yield {
                "kernel": each.key[:100],
                "launches": each.count,
                "us": float(each.self_device_time_total),
                "share": each.self_device_time_total / total_us,
            }
    yield {"kernels_of_the_step_us": float(total_us)}


def _weight_bytes(config: ModelConfig) -> int:
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return _matrix_bytes(config) + _BF16_BYTES * embedding


def _matrix_bytes(config: ModelConfig) -> int:
    """Every weight once, but for the embedding, of which a step reads a row a token (unless it is the head too)."""
    count = 0
    for name, shape in tensor_shapes(config).items():
        size = 1
        for length in shape:
            size *= length
        if name != "model.embed_tokens.weight" or config.tie_word_embeddings:
            count += size
    return count * _BF16_BYTES


def _kv_bytes_a_token(config: ModelConfig) -> int:
    return config.num_layers * 2 * config.num_kv_heads * config.head_dim * _BF16_BYTES


class _Steps:
    """The cases of one model shape."""

    def __init__(self, loop: CaseLoop, model_shape: str, ceilings: Ceilings) -> None:
        self._loop = loop
        self._shape = model_shape
        self._config = CudaKind(model_shape, _LIMITS).config
        self._ceilings = ceilings

    def with_graphs(self) -> None:
        with closing(_Model(CudaKind(self._shape, _LIMITS, uses_graphs=True))) as model:
            self._loop.run(f"{self._shape} with graphs", partial(_ready, model))
            for num_rows in _DECODE_ROWS:
                self._loop.run(f"decode {num_rows}, graph", partial(self._decode, model, num_rows))
            self._prompts(model, "graph")
            for num_rows in _PROFILED_ROWS:
                self._loop.run(f"profile of decode {num_rows}, graph", partial(self._profile, model, num_rows))

    def with_launches(self) -> None:
        with closing(_Model(CudaKind(self._shape, _LIMITS, uses_graphs=False))) as model:
            for num_rows in _DECODE_ROWS:
                self._loop.run(f"decode {num_rows}, launches", partial(self._decode, model, num_rows))
            self._prompts(model, "launches")

    def _prompts(self, model: _Model, way: str) -> None:
        """A graph is there for up to 512 rows."""
        for num_tokens in _PREFILL_TOKENS:
            self._loop.run(f"prefill {num_tokens}, {way}", partial(self._prefill, model, num_tokens))
        for num_decodes, num_tokens in _MIXED:
            name = f"decode {num_decodes} and prefill {num_tokens}, {way}"
            self._loop.run(name, partial(self._mixed, model, num_decodes, num_tokens))

    def products(self) -> None:
        timer, device = CudaTimer(), torch.device("cuda")
        for num_rows in _DECODE_ROWS:
            time_all = partial(time_products, self._config, num_rows, timer, self._ceilings, device)
            self._loop.run(f"products of {num_rows} rows", time_all)
        for num_rows in _DECODE_ROWS:
            time_exact = partial(time_exact_products, self._config, num_rows, timer, device)
            self._loop.run(f"exact products of {num_rows} rows", time_exact)

    def _decode(self, model: _Model, num_rows: int) -> Iterator[Record]:
        made = model.get()
        return time_step(made.runner, decode_work(self._config, num_rows, made.num_pages), self._ceilings)

    def _prefill(self, model: _Model, num_tokens: int) -> Iterator[Record]:
        return time_step(model.get().runner, prefill_work(self._config, num_tokens), self._ceilings)

    def _mixed(self, model: _Model, num_decodes: int, num_tokens: int) -> Iterator[Record]:
        made = model.get()
        work = mixed_work(self._config, num_decodes, num_tokens, made.num_pages)
        return time_step(made.runner, work, self._ceilings)

    def _profile(self, model: _Model, num_rows: int) -> Iterator[Record]:
        made = model.get()
        work, heading = decode_work(self._config, num_rows, made.num_pages), f"{self._shape}: decode {num_rows}, graph"
        return _profile(made.runner, work, heading, self._loop.out)


def _ready(model: _Model) -> Iterator[Record]:
    started_s = time.perf_counter()
    yield {"pages": model.get().num_pages, "ready_after_s": time.perf_counter() - started_s}


def part_of(model_shape: str) -> str:
    """llama-3.1-8b is the model of part step-8B."""
    return f"step-{model_shape.rpartition('-')[2].upper()}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-shape", default="llama-3.1-8b")
    add_options(parser.add_argument)
    arguments = parser.parse_args()
    selection = Selection(arguments.progress, arguments.only)
    loop = CaseLoop(part_of(arguments.model_shape), arguments.out, selection)
    ceilings = measure_ceilings(CudaTimer())
    loop.run("ceilings", lambda: [ceilings.as_record()])
    steps = _Steps(loop, arguments.model_shape, ceilings)
    steps.with_graphs()
    steps.products()
    steps.with_launches()
    return loop.exit_code


if __name__ == "__main__":
    sys.exit(main())

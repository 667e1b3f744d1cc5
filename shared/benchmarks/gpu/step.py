"""Steps of a dummy model on a GPU beside the time that its bytes take: `python -m benchmarks.gpu.step`."""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.gpu.model import CudaKind
from benchmarks.gpu.timer import Ceilings, CudaTimer, measure_ceilings
from weir.core.sampling import SamplingParams
from weir.engine.plan import ChunkPlan, ModelRunner, SampleSpec, StepPlan
from weir.kv.geometry import num_pages_for
from weir.model.architecture import ModelConfig, tensor_shapes
from weir.model.triton.batch import TritonLimits

_LIMITS = TritonLimits(max_rows=2048, max_sequences=128, max_context_tokens=4096)
_NUM_PAGES = 12_000
_CONTEXT = 1024
_DECODE_ROWS = (1, 8, 32, 128)
_PREFILL_TOKENS = (512, 2048)
_REPEATS = 20
_WARM_UPS = 3
_BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class GpuStepTime:
    """`floor_ms`: what the step's bytes or operations take at the speeds that were measured in this run."""

    step: str
    median_ms: float
    fastest_ms: float
    tokens_a_second: float
    floor_ms: float

    @property
    def times_floor(self) -> float:
        return self.median_ms / self.floor_ms


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-shape", default="llama-3.1-8b")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    ceilings = measure_ceilings(CudaTimer())
    rows = []
    for uses_graphs in (False, True):
        kind = CudaKind(arguments.model_shape, _LIMITS, uses_graphs)
        memory = kind.create_memory(_NUM_PAGES * kind.page_bytes)
        runner, warm_up = kind.make_runner(memory, _NUM_PAGES)
        warm_up()
        rows += list(_decodes(runner, kind.config, ceilings, "graph" if uses_graphs else "launches"))
        if uses_graphs:
            rows += list(_prefills(runner, kind.config, ceilings))
        del runner, warm_up
        torch.cuda.empty_cache()
        memory.close()
    print(f"{arguments.model_shape} bf16, {torch.cuda.get_device_name(0)}, context {_CONTEXT}")
    print("| step | median ms | fastest ms | tokens/s | times the floor |\n|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.step} | {row.median_ms:.2f} | {row.fastest_ms:.2f} | {row.tokens_a_second:.0f} | "
            f"{row.times_floor:.2f} |"
        )
    if arguments.out is not None:
        arguments.out.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    return 0


def _decodes(runner: ModelRunner, config: ModelConfig, ceilings: Ceilings, how: str) -> Iterable[GpuStepTime]:
    pages_each = num_pages_for(_CONTEXT + 1)
    for num_rows in _DECODE_ROWS:
        # sequences beyond the memory share pages: reads are the same, and what is written is never read
        tables = [
            tuple((row * pages_each + page) % _NUM_PAGES for page in range(pages_each)) for row in range(num_rows)
        ]
        spec = SampleSpec(SamplingParams(temperature=0.0), 1)
        chunks = tuple(ChunkPlan(row, _CONTEXT, (row + 1,), tables[row], spec) for row in range(num_rows))
        num_bytes = _matrix_bytes(config) + num_rows * _CONTEXT * _kv_bytes_a_token(config)
        num_flops = 2 * num_rows * _matrix_bytes(config) // _BF16_BYTES
        yield _time(f"decode {num_rows}, {how}", runner, StepPlan(0, chunks), num_rows, ceilings, num_bytes, num_flops)


def _prefills(runner: ModelRunner, config: ModelConfig, ceilings: Ceilings) -> Iterable[GpuStepTime]:
    for num_tokens in _PREFILL_TOKENS:
        spec = SampleSpec(SamplingParams(temperature=0.0), 0)
        chunk = ChunkPlan(0, 0, (1,) * num_tokens, tuple(range(num_pages_for(num_tokens))), spec)
        num_flops = 2 * num_tokens * _matrix_bytes(config) // _BF16_BYTES
        plan = StepPlan(0, (chunk,))
        yield _time(f"prefill {num_tokens}", runner, plan, num_tokens, ceilings, _matrix_bytes(config), num_flops)


def _time(
    step: str,
    runner: ModelRunner,
    plan: StepPlan,
    num_tokens: int,
    ceilings: Ceilings,
    num_bytes: int,
    num_flops: int,
) -> GpuStepTime:
    times_s = []
    for number in range(_WARM_UPS + _REPEATS):
        started_s = time.perf_counter()
        runner.run(plan)  # ends when the tokens are on the host
        if number >= _WARM_UPS:
            times_s.append(time.perf_counter() - started_s)
    median_s = statistics.median(times_s)
    # the copy of `ceilings` reads and writes; these bytes are only read, at the same speed in all
    floor_ms = ceilings.floor_us(num_bytes, num_flops) / 1000
    return GpuStepTime(step, 1000 * median_s, 1000 * min(times_s), num_tokens / median_s, floor_ms)


def _matrix_bytes(config: ModelConfig) -> int:
    """Every weight once, but for the embedding, of which a step reads a row a token (unless it is the head too)."""
    shapes = tensor_shapes(config)
    count = 0
    for name, shape in shapes.items():
        size = 1
        for length in shape:
            size *= length
        if name != "model.embed_tokens.weight" or config.tie_word_embeddings:
            count += size
    return count * _BF16_BYTES


def _kv_bytes_a_token(config: ModelConfig) -> int:
    return config.num_layers * 2 * config.num_kv_heads * config.head_dim * _BF16_BYTES


if __name__ == "__main__":
    sys.exit(main())

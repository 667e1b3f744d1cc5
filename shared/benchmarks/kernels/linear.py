"""How fast the linear layers of SmolLM2-135M run on this CPU, beside what its memory and its multipliers can do.

Weights are cold, as they are in a step of a whole model: copies of a matrix take turns over more memory than the caches
hold. Kernel and torch alternate; times are the fastest of some rounds, since other programs only ever make them
longer.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from benchmarks.kernels.limits import peak_gmac_s, read_bandwidth
from weir.ops.cpu.linear import linear, linear_range
from weir.ops.cpu.linear_pack import (
    BLOCK_OUTPUTS,
    PackedMatrix,
    WeightKind,
    aligned_empty,
    pack_q4_1,
    pack_q8_0,
    packed_bytes,
)
from weir.ops.cpu.quantize import quantize_rows
from weir.ops.cpu.quantized_rows import GROUP
from weir.ops.simd.features import InstructionSet, instruction_set
from weir.ops.simd.jit import parallel_kernel

_NUM_LAYERS, _HIDDEN, _INNER, _QKV, _VOCABULARY = 30, 576, 1536, 960, 49152
_LAYER = (
    (WeightKind.INT4, _QKV, _HIDDEN),
    (WeightKind.INT4, _HIDDEN, _HIDDEN),
    (WeightKind.INT4, 2 * _INNER, _HIDDEN),
    (WeightKind.INT4, _HIDDEN, _INNER),
)
_HEAD = (WeightKind.INT8, _VOCABULARY, _HIDDEN)
_NUM_ROWS = (1, 2, 8, 32, 128)
_COLD_BYTES = 64 << 20
_LEAST_ROUNDS = 3
_SECONDS = 1.0
_MOST_CALLS = 60


@dataclass(frozen=True, slots=True)
class LinearTime:
    """One layer. Bandwidth (of memory) and peak (multiply-adds in registers) are measured in the same run."""

    kind: WeightKind
    num_outputs: int
    num_inputs: int
    num_rows: int
    num_threads: int
    kernel_us: float
    torch_fp32_us: float
    weight_bytes: int
    bandwidth_gb_s: float
    peak_gmac_s: float

    @property
    def read_gb_s(self) -> float:
        return self.weight_bytes / self.kernel_us / 1e3

    @property
    def gmac_s(self) -> float:
        return self.num_rows * self.num_outputs * self.num_inputs / self.kernel_us / 1e3


@dataclass(frozen=True, slots=True)
class ModelTime:
    """All linear layers of the model and its head, one after the other, for some rows."""

    num_rows: int
    num_threads: int
    step_ms: float

    @property
    def rows_a_second(self) -> float:
        return self.num_rows / self.step_ms * 1e3


@dataclass(frozen=True, slots=True)
class CpuKernelReport:
    """What `run_cpu_kernels` measured."""

    instruction_set: InstructionSet
    layers: tuple[LinearTime, ...]
    models: tuple[ModelTime, ...]


def run_cpu_kernels() -> CpuKernelReport:
    """On one thread, then on all. Takes some two minutes and 1 GiB; leaves numba and torch with all threads."""
    layers, models = [], []
    for num_threads in sorted({1, numba.config.NUMBA_NUM_THREADS}):
        numba.set_num_threads(num_threads)
        torch.set_num_threads(num_threads)
        bandwidth = read_bandwidth(num_threads)
        for kind, num_outputs, num_inputs in (*_LAYER, _HEAD):
            peak = num_threads * peak_gmac_s(kind)
            layers += measure_layer(kind, num_outputs, num_inputs, num_threads, bandwidth, peak)
        models += measure_model(num_threads)
    return CpuKernelReport(instruction_set(), tuple(layers), tuple(models))


def measure_layer(
    kind: WeightKind, num_outputs: int, num_inputs: int, num_threads: int, bandwidth_gb_s: float, peak: float
) -> list[LinearTime]:
    """One shape, for all numbers of rows."""
    size = packed_bytes(kind, num_outputs, num_inputs)
    matrices = [random_matrix(kind, num_outputs, num_inputs)]
    copies = min(_MOST_CALLS, -(-_COLD_BYTES // size))
    matrices += [_copy_of(matrices[0]) for _ in range(copies - 1)]
    dense = [torch.randn(num_outputs, num_inputs) for _ in range(-(-_COLD_BYTES // (4 * num_outputs * num_inputs)))]
    times = []
    for num_rows in _NUM_ROWS:
        inputs = torch.randn(num_rows, num_inputs)
        rows, out = quantize_rows(inputs.numpy()), np.empty((num_rows, num_outputs), np.float32)
        kernel_us, torch_us = fastest_us(
            [partial(linear, rows, matrix, out) for matrix in matrices],
            [partial(functional.linear, inputs, weights) for weights in dense],
        )
        times.append(
            LinearTime(
                kind, num_outputs, num_inputs, num_rows, num_threads, kernel_us, torch_us, size, bandwidth_gb_s, peak
            )
        )
    return times


def measure_model(num_threads: int) -> list[ModelTime]:
    """The layers and the head in one compiled call, as the runner has it."""
    shapes = [*_LAYER * _NUM_LAYERS, _HEAD]
    ends = [0, *itertools.accumulate(packed_bytes(*shape) for shape in shapes)]
    data = aligned_empty(ends[-1])
    table = np.array([(start, *shape) for start, shape in zip(ends[:-1], shapes, strict=True)], dtype=np.int64)
    patterns = {shape: random_matrix(*shape).data for shape in {*shapes}}
    for (start, end), shape in zip(itertools.pairwise(ends), shapes, strict=True):
        data[start:end] = patterns[shape]
    times = []
    for num_rows in _NUM_ROWS:
        inputs = {width: quantize_rows(_random((num_rows, width))) for width in (_HIDDEN, _INNER)}
        out = np.empty(num_rows * _VOCABULARY, np.float32)
        run = partial(_run_model, data, table, inputs[_HIDDEN], inputs[_INNER], out, num_threads)
        (step_us,) = fastest_us([run])
        times.append(ModelTime(num_rows, num_threads, step_us / 1e3))
    return times


@parallel_kernel
def _run_model(
    data: NDArray[np.uint8],
    table: NDArray[np.int64],
    hidden: NDArray[np.uint8],
    inner: NDArray[np.uint8],
    memory: NDArray[np.float32],
    num_threads: int,
) -> None:
    """`table` [matrices, (offset, kind, outputs, inputs)]."""
    for index in range(table.shape[0]):
        start, bits, num_outputs, num_inputs = table[index]
        rows = hidden if num_inputs == _HIDDEN else inner
        out = memory[: hidden.shape[0] * num_outputs].reshape((hidden.shape[0], num_outputs))
        num_blocks = num_outputs // BLOCK_OUTPUTS
        for thread in numba.prange(num_threads):
            first, last = num_blocks * thread // num_threads, num_blocks * (thread + 1) // num_threads
            linear_range(rows, data[start:], bits, out, False, first, last)


def _random(shape: tuple[int, int]) -> NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def random_matrix(kind: WeightKind, num_outputs: int, num_inputs: int) -> PackedMatrix:
    random = np.random.default_rng(1)
    scales = random.uniform(0.01, 0.02, (num_outputs, num_inputs // GROUP)).astype(np.float16)
    if kind is WeightKind.INT8:
        return pack_q8_0(random.integers(-127, 128, (num_outputs, num_inputs)).astype(np.int8), scales)
    quants = random.integers(0, 16, (num_outputs, num_inputs)).astype(np.uint8)
    return pack_q4_1(quants, scales, -8 * scales)


def _copy_of(matrix: PackedMatrix) -> PackedMatrix:
    data = aligned_empty(matrix.data.size)
    data[:] = matrix.data
    return replace(matrix, data=data)


def fastest_us(*turns: Sequence[Callable[[], object]], seconds: float = _SECONDS) -> list[float]:
    """The mean time of each list's calls, each the fastest of some rounds; the lists take turns."""
    fastest = [[float("inf")] * len(calls) for calls in turns]
    end = time.perf_counter() + seconds
    for number in itertools.count():
        for calls, times in zip(turns, fastest, strict=True):
            for index, call in enumerate(calls):
                start = time.perf_counter()
                call()
                times[index] = min(times[index], time.perf_counter() - start)
        if number >= _LEAST_ROUNDS and time.perf_counter() > end:
            return [statistics.fmean(times) * 1e6 for times in fastest]
    raise AssertionError("unreachable")


def as_lines(report: CpuKernelReport) -> list[str]:
    """Two tables in plain text."""
    lines = [
        f"instructions: {report.instruction_set}",
        f"{'layer':>18} {'rows':>5} {'threads':>7} {'us':>9} {'GB/s':>6} {'of memory':>9} {'GMAC/s':>7} {'of peak':>7} "
        f"{'torch fp32 us':>13} {'ratio':>6}",
    ]
    lines += [
        f"{f'{t.num_inputs} to {t.num_outputs} {t.kind}b':>18} {t.num_rows:5} {t.num_threads:7} {t.kernel_us:9.1f} "
        f"{t.read_gb_s:6.1f} {t.read_gb_s / t.bandwidth_gb_s:9.0%} {t.gmac_s:7.1f} {t.gmac_s / t.peak_gmac_s:7.0%} "
        f"{t.torch_fp32_us:13.1f} {t.torch_fp32_us / t.kernel_us:6.1f}"
        for t in report.layers
    ]
    lines += ["", f"{'whole model, rows':>18} {'threads':>7} {'ms':>9} {'rows/s':>7}"]
    lines += [f"{t.num_rows:18} {t.num_threads:7} {t.step_ms:9.2f} {t.rows_a_second:7.0f}" for t in report.models]
    return lines

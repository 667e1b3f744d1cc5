"""Times work on a GPU, and what the GPU can do at most."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

_REPEATS = 30
_WARM_UPS = 3
_FLUSH_BYTES = 256 << 20  # several times the second-level cache of any GPU so far
_MOST_COPY_BYTES = 4 << 30
_MATMUL_SIZE = 8192


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one call: median, and the times that a tenth of the calls undercut and exceed."""

    median_us: float
    fast_us: float
    slow_us: float


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes read plus bytes written by a kernel that copies, bytes read by one that adds up, and multiply-adds of a
    bf16 product counted twice, all a second."""

    copy_bytes_a_second: float
    read_bytes_a_second: float
    matmul_flops_a_second: float

    def floor_us(self, num_bytes: int, num_flops: int) -> float:
        """No kernel that moves these bytes and does these operations is faster."""
        bytes_a_second = max(self.copy_bytes_a_second, self.read_bytes_a_second)
        return max(num_bytes / bytes_a_second, num_flops / self.matmul_flops_a_second) * 1e6

    def as_record(self) -> dict[str, float]:
        return {
            "copy_gb_a_second": self.copy_bytes_a_second / 1e9,
            "read_gb_a_second": self.read_bytes_a_second / 1e9,
            "bf16_tflops": self.matmul_flops_a_second / 1e12,
        }


class Timer(Protocol):
    """Calls something often enough to say how long it takes."""

    def time(self, call: Callable[[], object]) -> Timing: ...


class CudaTimer:
    """CUDA events around replays of a graph, so that no launch is measured; caches are flushed before each."""

    def __init__(self) -> None:
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def time(self, call: Callable[[], object]) -> Timing:
        """Calls that cannot be captured raise what CUDA raises."""
        for _ in range(_WARM_UPS):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graph.replay()
        starts = [_event() for _ in range(_REPEATS)]
        ends = [_event() for _ in range(_REPEATS)]
        for start, end in zip(starts, ends, strict=True):
            self._flush.zero_()
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        times_us = [start.elapsed_time(end) * 1e3 for start, end in zip(starts, ends, strict=True)]
        tenths = statistics.quantiles(times_us, n=10)
        return Timing(statistics.median(times_us), tenths[0], tenths[-1])


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def measure_ceilings(timer: Timer) -> Ceilings:
    """Random data: a matrix product of zeros is faster than any real one. A copy by `copy_` is none of the fastest: in
    a graph it may be left to a copy engine."""
    free_bytes, _ = torch.cuda.mem_get_info()
    copy_bytes = min(_MOST_COPY_BYTES, free_bytes // 4)
    source = torch.randn(copy_bytes // 4, device="cuda")
    target = torch.empty_like(source)
    copy_us = timer.time(partial(torch.neg, source, out=target)).median_us
    read_us = timer.time(partial(torch.sum, source)).median_us
    del source, target
    left, right = (
        torch.randn(_MATMUL_SIZE, _MATMUL_SIZE, device="cuda", dtype=torch.bfloat16),
        torch.randn(_MATMUL_SIZE, _MATMUL_SIZE, device="cuda", dtype=torch.bfloat16),
    )
    product = torch.empty_like(left)
    matmul_us = timer.time(partial(torch.mm, left, right, out=product)).median_us
    return Ceilings(2 * copy_bytes / copy_us * 1e6, copy_bytes / read_us * 1e6, 2 * _MATMUL_SIZE**3 / matmul_us * 1e6)

"""How fast this CPU reads memory: what no kernel can pass."""

import time

import numpy as np
from numpy.typing import NDArray

from weir.model.cpu.core_share import FixedShare
from weir.model.cpu.threads import ThreadTeam, most_chunks
from weir.ops.simd.jit import kernel
from weir.ops.simd.loops import address_of, prefetch
from weir.ops.simd.phases import PhaseState, chunk_is_done, take_chunk, wait_for_phase

COLD_BYTES = 256 << 20
"""More than caches hold."""
SECONDS = 1.0
LEAST_PASSES = 3
_LINE_BYTES, _LINES_AHEAD = 64, 64


@kernel
def _sum_lines(lines: NDArray[np.int64], sums: NDArray[np.int64], thread: int, num_threads: int) -> None:
    """`lines` [lines, 8 words]. Hardware fetches ahead up to the end of a memory page only: the rest is asked for."""
    total = 0
    for line in range(len(lines) * thread // num_threads, len(lines) * (thread + 1) // num_threads):
        prefetch(address_of(lines) + (line + _LINES_AHEAD) * _LINE_BYTES)
        for word in range(8):
            total += lines[line, word]
    sums[thread] = total


@kernel
def _sum_all(lines: NDArray[np.int64], sums: NDArray[np.int64], state: PhaseState, base: int, num_chunks: int) -> None:
    chunk = take_chunk(state, base, 0, num_chunks)
    while chunk >= 0:
        _sum_lines(lines, sums, chunk, num_chunks)
        chunk_is_done(state)
        chunk = take_chunk(state, base, 0, num_chunks)
    wait_for_phase(state, base, 0, num_chunks)


def read_bandwidth(num_threads: int) -> float:
    """GB/s of adding up memory that no cache holds, on so many threads; the fastest of some runs."""
    lines, sums = np.ones((COLD_BYTES // _LINE_BYTES, 8), np.int64), np.zeros(most_chunks(num_threads), np.int64)
    team = ThreadTeam(FixedShare(num_threads))

    def work(state: PhaseState, base: int, num_chunks: int) -> None:
        _sum_all(lines, sums, state, base, num_chunks)

    seconds: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(seconds) < LEAST_PASSES or time.perf_counter() < end:
        start = time.perf_counter()
        team.run(work, len(lines))
        seconds.append(time.perf_counter() - start)
    return lines.nbytes / min(seconds[1:]) / 1e9

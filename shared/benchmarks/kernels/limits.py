"""What this CPU can do at most, and no kernel passes: bytes a second from memory, multiply-adds a second."""

import time
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numpy.typing import NDArray

from weir.model.cpu.core_share import FixedShare
from weir.model.cpu.threads import ThreadTeam, most_chunks
from weir.ops.simd.features import instruction_set
from weir.ops.simd.integer import dot_product, emit_int_constant, int_vector
from weir.ops.simd.jit import kernel, simd
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


_CHAINS = 8  # independent sums: more than latency times instructions a cycle
_NUM_STEPS = 200_000
_TIMES = 15


def peak_gmac_s(bits: int) -> float:
    """Of one thread's vectors, with weights of 4 or 8 bits: the fastest of some runs. Tiles of AMX may do more."""
    seconds = []
    for _ in range(_TIMES):
        start = time.perf_counter()
        _run(_NUM_STEPS, bits)
        seconds.append(time.perf_counter() - start)
    return _NUM_STEPS * _CHAINS * 4 * dot_product(instruction_set().vectors, bits).width / min(seconds) / 1e9


def _make_chains(bits: int) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        return _emit_chains(builder, bits, values[0])

    def chains(typing_context: Any, num_steps: Any) -> Any:
        return types.int32(types.int64), codegen

    return simd(chains)


def _emit_chains(builder: ir.IRBuilder, bits: int, num_steps: ir.Value) -> ir.Value:
    """Every step adds the products of one row vector, another each step, with the chains' different weights."""
    dot = dot_product(instruction_set().vectors, bits)
    lanes = int_vector(dot.width)
    sums = [[cgutils.alloca_once_value(builder, part) for part in dot.start(builder, None)] for _ in range(_CHAINS)]
    undefined = ir.Constant(lanes, ir.Undefined)
    with cgutils.for_range(builder, num_steps, intp=ir.IntType(64)) as loop:
        first = builder.insert_element(undefined, builder.trunc(loop.index, lanes.element), ir.IntType(32)(0))
        row = builder.shuffle_vector(first, undefined, emit_int_constant(lanes, 0))
        for chain, memory in enumerate(sums):
            stored = emit_int_constant(lanes, 0x04030201 * (chain + 1))
            (weights, *_) = dot.prepare(builder, stored)
            total = dot.add(builder, tuple(builder.load(part) for part in memory), weights, row)
            for part, value in zip(memory, total, strict=True):
                builder.store(value, part)
    totals = [dot.finish(builder, tuple(builder.load(part) for part in memory), None) for memory in sums]
    combined = totals[0]
    for total in totals[1:]:
        combined = builder.xor(combined, total)
    return builder.extract_element(combined, ir.IntType(32)(0))


_chains_int4, _chains_int8 = _make_chains(4), _make_chains(8)


@kernel
def _run(num_steps: int, bits: int) -> int:
    total: int = _chains_int4(num_steps) if bits == 4 else _chains_int8(num_steps)
    return total

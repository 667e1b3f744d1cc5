"""How many 8-bit multiply-adds a second this CPU can do where nothing but the multiplying instructions limits it."""

import time
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from weir.ops.simd.features import instruction_set
from weir.ops.simd.integer import dot_product, emit_int_constant, int_vector
from weir.ops.simd.jit import kernel, simd

_CHAINS = 8  # independent sums: more than latency times instructions a cycle
_NUM_STEPS = 200_000
_TIMES = 15


def peak_gmac_s(bits: int) -> float:
    """Of one thread, with weights of 4 or 8 bits: the fastest of some runs."""
    seconds = []
    for _ in range(_TIMES):
        start = time.perf_counter()
        _run(_NUM_STEPS, bits)
        seconds.append(time.perf_counter() - start)
    return _NUM_STEPS * _CHAINS * 4 * dot_product(instruction_set(), bits).width / min(seconds) / 1e9


def _make_chains(bits: int) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        return _emit_chains(builder, bits, values[0])

    def chains(typing_context: Any, num_steps: Any) -> Any:
        return types.int32(types.int64), codegen

    return simd(chains)


def _emit_chains(builder: ir.IRBuilder, bits: int, num_steps: ir.Value) -> ir.Value:
    """Every step adds the products of one row vector, another each step, with the chains' different weights."""
    dot = dot_product(instruction_set(), bits)
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

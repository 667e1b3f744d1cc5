"""A barrier for the few threads that run one compiled step together, and for nobody else.

Waiting is a short spin, then `sched_yield` in a loop: with a core of its own a thread passes in well under a
microsecond, and where another process wants the core it gets it. Between steps no thread waits here at all; OpenMP's
threads would go on spinning for milliseconds after each region, on cores that other workers need.

    state[ARRIVALS]   threads that have arrived at any barrier since the array was made; it only grows
    state[ABANDONED]  not 0: a thread has failed and will not come; nobody waits any more
"""

import platform
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils

from weir.ops.simd.jit import kernel, simd

BarrierState = npt.NDArray[np.int64]

ARRIVALS = 0
ABANDONED = 8  # a cache line of its own
_STATE_SIZE = 16
_SPINS = 2000
_STATE_TYPE = types.Array(types.int64, 1, "C")
_IS_X86 = platform.machine() in {"x86_64", "AMD64"}


def make_barrier() -> BarrierState:
    """State of one crew of threads."""
    return np.zeros(_STATE_SIZE, dtype=np.int64)


@simd
def _add(typing_context: Any, state: Any, place: Any, value: Any) -> Any:
    """Adds to state[place] in one piece; returns what was there."""
    del typing_context, state, place, value

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        address = _address(context, builder, signature, args)
        return builder.atomic_rmw("add", address, args[2], "acq_rel")

    return types.int64(_STATE_TYPE, types.intp, types.int64), generate


@simd
def _load(typing_context: Any, state: Any, place: Any) -> Any:
    """What other threads did before they added to state[place] is seen after this."""
    del typing_context, state, place

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.load_atomic(_address(context, builder, signature, args), "acquire", 8)

    return types.int64(_STATE_TYPE, types.intp), generate


@simd
def _pause(typing_context: Any) -> Any:
    """Tells the core that it spins."""
    del typing_context

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        del signature, args
        if _IS_X86:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


@simd
def _yield_core(typing_context: Any) -> Any:
    """`sched_yield` of the C library."""
    del typing_context

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        del context, signature, args
        kind = ir.FunctionType(ir.IntType(32), [])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])

    return types.int32(), generate


def _address(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
    array = context.make_array(signature.args[0])(context, builder, args[0])
    return cgutils.get_item_pointer(context, builder, signature.args[0], array, [args[1]], wraparound=False)


@kernel
def num_arrivals(state: BarrierState) -> int:
    """For the thread that starts a step: the `base` of all threads of that step, while none of them runs."""
    return int(_load(state, ARRIVALS))


@kernel
def abandon(state: BarrierState) -> None:
    """Lets every waiting thread go on, with whatever the others have not done: the step's results are void."""
    _add(state, ABANDONED, 1)


@kernel
def wait_for_all(state: BarrierState, base: int, num_passed: int, num_threads: int) -> int:
    """Returns `num_passed` + 1, the number of barriers of this step that are passed, when all threads are here.

    What they wrote before is seen after.
    """
    if num_threads == 1:
        return num_passed + 1
    target = base + (num_passed + 1) * num_threads
    arrived = _add(state, ARRIVALS, 1) + 1
    num_spins = 0
    while arrived < target:
        num_spins += 1
        if num_spins < _SPINS:
            _pause()
        else:
            if _load(state, ABANDONED) != 0:
                break
            _yield_core()
        arrived = _load(state, ARRIVALS)
    return num_passed + 1

"""Work that a few threads do together in phases, each a number of chunks that whoever is free takes.

A phase begins when all chunks of the one before are done. A thread that waits holds no chunk, so one that the operating
system keeps off its core holds nobody up: the others do its share. (With a barrier for all threads every phase waited
for the slowest, and on busy cores a step took ten times as long as on one thread.) Waiting is a short spin, then
`sched_yield` in a loop; between steps no thread waits here at all, where OpenMP's threads would go on spinning.

    state[TICKETS]    chunks that were ever taken; a call's phase p is tickets [base + p n, base + (p + 1) n)
    state[DONE]       chunks that were ever done
    state[ABANDONED]  not 0: a thread has failed in a chunk, which nobody will do; nobody waits any more

A thread that comes late, even after the call has ended, finds every chunk of its phases taken.
"""

import platform
import time
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils

from weir.ops.simd.jit import kernel, simd

PhaseState = npt.NDArray[np.int64]

TICKETS, DONE, ABANDONED = 0, 8, 16  # each in a cache line of its own
_STATE_SIZE = 24
_SPINS = 2000
_STATE_TYPE = types.Array(types.int64, 1, "C")
_IS_X86 = platform.machine() in {"x86_64", "AMD64"}


def make_phases() -> PhaseState:
    """Of one thread team."""
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
def _take(typing_context: Any, state: Any, place: Any, expected: Any, value: Any) -> Any:
    """Sets state[place] to `value` if it is `expected`; whether it was."""
    del typing_context, state, place, expected, value

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        address = _address(context, builder, signature, args)
        answer = builder.cmpxchg(address, args[2], args[3], "acq_rel", "acquire")
        return builder.extract_value(answer, 1)

    return types.boolean(_STATE_TYPE, types.intp, types.int64, types.int64), generate


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


@simd
def now_ns(typing_context: Any) -> Any:
    """The monotonic clock of the C library: some 25 ns a call."""
    del typing_context

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        del context, signature, args
        word, clock = ir.IntType(64), ir.IntType(32)
        place = cgutils.alloca_once(builder, word, size=2)  # struct timespec: seconds, nanoseconds
        kind = ir.FunctionType(clock, [clock, word.as_pointer()])
        function = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
        builder.call(function, [ir.Constant(clock, time.CLOCK_MONOTONIC), place])
        seconds, nanoseconds = (builder.load(builder.gep(place, [ir.Constant(clock, index)])) for index in range(2))
        return builder.add(builder.mul(seconds, ir.Constant(word, 1_000_000_000)), nanoseconds)

    return types.int64(), generate


def _address(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
    array = context.make_array(signature.args[0])(context, builder, args[0])
    return cgutils.get_item_pointer(context, builder, signature.args[0], array, [args[1]], wraparound=False)


@kernel
def num_taken(state: PhaseState) -> int:
    """For the thread that starts a call: the `base` of all its threads."""
    return int(_load(state, TICKETS))


@kernel
def abandon(state: PhaseState) -> None:
    """Lets every waiting thread go on, whatever was not done: the call's results are void."""
    _add(state, ABANDONED, 1)


@kernel
def take_chunk(state: PhaseState, base: int, phase: int, num_chunks: int) -> int:
    """A chunk of the phase, in 0 … num_chunks - 1, which is the caller's to do; -1 if all are taken."""
    first = base + phase * num_chunks
    while True:
        ticket = _load(state, TICKETS)
        if ticket >= first + num_chunks:
            return -1
        if _take(state, TICKETS, ticket, ticket + 1):
            return int(ticket - first)


@kernel
def chunk_is_done(state: PhaseState) -> None:
    """What the caller wrote is seen by whoever does a chunk of the next phase."""
    _add(state, DONE, 1)


@kernel
def wait_for_phase(state: PhaseState, base: int, phase: int, num_chunks: int) -> int:
    """Returns the next phase's number when all chunks of this one are done."""
    target = base + (phase + 1) * num_chunks
    num_spins = 0
    while _load(state, DONE) < target:
        num_spins += 1
        if num_spins < _SPINS:
            _pause()
        else:
            if _load(state, ABANDONED) != 0:
                break
            _yield_core()
    return phase + 1

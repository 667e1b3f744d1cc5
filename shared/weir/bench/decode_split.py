"""Where the time of an int8 decode step goes, by leaving parts of it out."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from weir.bench.step_shapes import StepShape, timed_ms
from weir.model.cpu.core_share import CoreShare
from weir.model.cpu.forward import linear_share
from weir.model.cpu.threads import ThreadTeam, most_chunks
from weir.model.cpu.workspace import (
    ATTENTION_OUTPUT,
    DOWN,
    GATE_UP,
    QUERY_KEY_VALUE,
    Buffers,
    Model,
    Workspace,
    make_model,
)
from weir.model.load import Int8Weights, Runner
from weir.ops.simd.jit import kernel
from weir.ops.simd.phases import PhaseState, chunk_is_done, take_chunk, wait_for_phase

_REPEATS = 15


@dataclass(frozen=True, slots=True)
class DecodeSplit:
    """Where the time of a decode step goes. `attention_ms` is what the context costs beyond its first token."""

    num_sequences: int
    linear_ms: float
    head_ms: float
    attention_ms: float
    other_ms: float


def measure_split(weights: Int8Weights, runner: Runner, share: CoreShare, shape: StepShape) -> DecodeSplit:
    """Of a step of decodes. What is a difference of two measurements has the noise of both."""
    num_sequences, vocab_size = shape.num_decodes, weights.config.vocab_size
    model, buffers = (
        make_model(weights.config, weights.packed),
        Workspace(weights.config, most_chunks(share.most)).buffers,
    )
    team = ThreadTeam(share)

    def linears(state: PhaseState, base: int, num_chunks: int) -> None:
        _linears(model, buffers, num_sequences, state, base, num_chunks)

    linear_ms = _median_ms(lambda: team.run(linears, num_sequences))
    headless, short = replace(shape, is_sampled=False), replace(shape, is_sampled=False, context_tokens=2)
    whole_ms, headless_ms, short_ms = (
        _median_ms(partial(runner.run, each.plan(vocab_size))) for each in (shape, headless, short)
    )
    return DecodeSplit(
        num_sequences,
        linear_ms=linear_ms,
        head_ms=whole_ms - headless_ms,
        attention_ms=headless_ms - short_ms,
        other_ms=short_ms - linear_ms,
    )


def _median_ms(call: Callable[[], object]) -> float:
    return statistics.median(timed_ms(call, _REPEATS))


@kernel
def _linears(model: Model, buffers: Buffers, num_rows: int, state: PhaseState, base: int, num_chunks: int) -> None:
    """The linear layers of all layers and nothing else."""
    hidden, rows_hidden = buffers.hidden[:num_rows], buffers.rows_hidden[:num_rows]
    phase = 0
    for parts in model.layer_parts:
        for matrix in range(4):
            chunk = take_chunk(state, base, phase, num_chunks)
            while chunk >= 0:
                if matrix == QUERY_KEY_VALUE:
                    rows, out = rows_hidden, buffers.qkv[:num_rows]
                elif matrix == ATTENTION_OUTPUT:
                    rows, out = buffers.rows_heads[:num_rows], hidden
                elif matrix == GATE_UP:
                    rows, out = rows_hidden, buffers.gate_up[:num_rows]
                else:
                    rows, out = buffers.rows_inner[:num_rows], hidden
                linear_share(
                    model.data,
                    parts[matrix],
                    rows,
                    out,
                    buffers.part,
                    matrix in (ATTENTION_OUTPUT, DOWN),
                    chunk,
                    num_chunks,
                )
                chunk_is_done(state)
                chunk = take_chunk(state, base, phase, num_chunks)
            phase = wait_for_phase(state, base, phase, num_chunks)
